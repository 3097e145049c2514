"""Pictures of schedules, word vectors, denoising and training. Needs the extra `[plot]`; nothing else here does."""
