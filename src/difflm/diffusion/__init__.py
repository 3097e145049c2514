"""The mathematics of diffusion: schedules, processes, codecs, objectives, bounds, samplers. Imports errors alone."""
