"""The mathematics of diffusion: schedules, processes, codecs, objectives, bounds, samplers. It imports nothing but errors."""
