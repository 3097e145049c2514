"""Signal, noise and log-SNR over time, of every schedule."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from difflm.app.plots.canvas import line_style, open_figure
from difflm.diffusion.processes import Gaussian
from difflm.diffusion.processes.gaussian import Cosine, LinearBeta, LogSnrShift, Sqrt
from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.methods.difflm import DiffLM

POINTS = 501
LOG_SNR_SHOWN = (-16.0, 12.0)  # curves that fall to −20 at their very end would flatten all others


@dataclass(frozen=True)
class Curve:
    """`alpha`, `sigma` and `log_snr` at evenly spaced times in [0, 1]."""

    name: str
    alpha: NDArray[np.float64]
    sigma: NDArray[np.float64]
    log_snr: NDArray[np.float64]


def sample_curve(name: str, process: Gaussian, time_of: Callable[[Tensor], Tensor] = lambda u: u) -> Curve:
    """The mean over positions if each has its own curve."""
    t = time_of(torch.linspace(0, 1, POINTS)).double()
    level = process.at(t)
    means = (values.view(POINTS, -1).mean(1) for values in (level.alpha, level.sigma, level.log_snr))
    return Curve(name, *(values.numpy() for values in means))


def known_curves() -> list[Curve]:
    shift = float(DiffLM.model_fields["log_snr_shift"].default)
    schedules = {
        "linear": LinearBeta(),
        "cosine": Cosine(),
        "sqrt": Sqrt(),
        f"cosine, log-SNR {shift:+g} (difflm)".replace("-", "−").replace("log−", "log-"): LogSnrShift(Cosine(), shift),
    }
    return [sample_curve(name, Gaussian(schedule)) for name, schedule in schedules.items()]


def learned_curve(name: str, lm: TextDiffusion) -> Curve:
    """A run's own curve; with a learned warp, along the evenly spaced u in which it trains and samples."""
    if lm.model.capabilities.state in ("edits", "prefix"):
        raise UsageError(f"{name} ({lm.config['method']}) has no noise schedule. Give a diffusion model, or none.")
    if lm.model.capabilities.state == "tokens":
        raise UsageError(f"{name} ({lm.config['method']}) diffuses tokens, which have no signal-to-noise ratio.")
    times, process = lm.model.times, cast(Gaussian, lm.model.denoiser.process)
    return sample_curve(f"{name}, {'learned warp (over u)' if times.learned else 'its own'}", process, times.time_of)


def draw_schedules(out: Path, curves: list[Curve], dark: bool = False) -> None:
    with open_figure(out, 4.0, dark) as figure:
        panels = figure.subplots(1, 3)
        for panel, title in zip(panels, ("signal α", "noise σ", "log-SNR  λ = log α²/σ²"), strict=True):
            panel.set(title=title, xlabel="time t (0 is text, 1 is noise)", xlim=(0, 1))
            panel.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "¼", "½", "¾", "1"])
        for number, c in enumerate(curves):
            for panel, values in zip(panels, (c.alpha, c.sigma, c.log_snr), strict=True):
                panel.plot(np.linspace(0, 1, POINTS), values, label=c.name, **line_style(number))
        panels[2].set_ylim(*LOG_SNR_SHOWN)
        panels[2].axhline(0, color=panels[2].xaxis.label.get_color(), linewidth=0.6)
        tight = {"fontsize": 8.5, "columnspacing": 1.3, "handlelength": 2.6, "handletextpad": 0.5}
        place = {"loc": "outside lower center", "ncols": len(curves)}
        figure.legend(*panels[0].get_legend_handles_labels(), **place, **tight)
