"""Diffusion as mathematics: it knows nothing of texts, files or devices. What models and methods are composed of can be
imported from here; the modules have more."""
# ruff: noqa: F401

from difflm.diffusion.base import Belief, Levels, State, Times, cross_entropy, expand_levels
from difflm.diffusion.bounds import Bound, DiscreteBound, ScoredTexts, standard_error
from difflm.diffusion.codecs import Codec, FixedEmbedding, LearnedEmbedding, Simplex, Tokens
from difflm.diffusion.codecs.embedding import X0, Logits, Prediction, V
from difflm.diffusion.condition import FREE, UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import CrossAttention, Denoiser, SelfConditioning, autocast_to, require_source
from difflm.diffusion.noise import Noise, Step
from difflm.diffusion.objectives import Corrupted, Objective
from difflm.diffusion.processes import Absorbing, Cosine, DiscreteProcess, Gaussian, GaussianLevels, Schedule, Sqrt
from difflm.diffusion.timesteps import LearnedWarp, LowDiscrepancy, StepSpan, TimeSampler
from difflm.diffusion.word_bound import GaussianBound, NoisyWords
