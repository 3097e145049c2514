"""The training loop, the moving average of its weights, and checkpoints that lose nothing."""
