"""Machinery that knows nothing of diffusion: CUDA graphs, threads, files, tensors, kernels."""
