"""Losses and validation over steps, of one run or several."""

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from difflm.app.plots.canvas import draw_panels, line_style
from difflm.errors import DifflmError
from difflm.training.model_card import read_metrics
from difflm.training.run import find_run, read_config

NOT_LOSSES = {"kind", "step", "lr", "seconds", "steps_per_second", "tokens_per_second"}
VALIDATION, LOSS = "validation, nats/token", "training loss"
LOG_FROM = 5.0  # the ratio of largest to smallest from which a linear axis hides the end of the curve

Points = tuple[NDArray[np.int64], NDArray[np.float64]]  # steps, values


@dataclass(frozen=True)
class History:
    """The logged metrics of a run by the title of their panel: nats/token on held-out texts, every part of the loss."""

    label: str
    curves: dict[str, Points]


def read_history(name_or_path: str) -> History:
    """Read what a run logged in `metrics.jsonl`."""
    folder = find_run(name_or_path)
    method, path = read_config(folder)["method"], folder / "metrics.jsonl"
    if not path.exists():
        raise DifflmError(f"{path} does not exist: this run logged nothing while it trained.")
    records = [record for record in read_metrics(folder) if "step" in record]
    train = [record for record in records if record.get("kind") == "train"]
    valid = [record for record in records if record.get("kind") == "validation" and "nats_per_token" in record]
    if not train and not valid:
        raise DifflmError(f"{path} holds no line about training steps. Only runs of `difflm train` can be plotted.")
    curves = {VALIDATION: collect_points(valid, "nats_per_token")} if valid else {}
    for name in sorted({name for record in train for name in record} - NOT_LOSSES):
        curves[LOSS if name == "loss" else f"loss part: {name}"] = collect_points(train, name)
    name, kind = folder.resolve().name, valid[-1].get("likelihood") if valid else None
    return History((name if name == method else f"{name}, {method}") + (f" ({kind})" if kind else ""), curves)


def collect_points(records: list[dict[str, Any]], name: str) -> Points:
    """Sort by step; if a step was logged twice, the later line counts."""
    found = {int(r["step"]): float(r[name]) for r in records if isinstance(r.get(name), int | float)}
    steps = sorted(found)
    return np.array(steps, dtype=np.int64), np.array([found[step] for step in steps])


def wants_log(values: list[NDArray[np.float64]]) -> bool:
    """A loss that falls by a large factor is read on a log axis; one that touches zero cannot be."""
    finite = [value for value in np.concatenate(values).tolist() if isfinite(value)]
    return 0 < min(finite, default=0) < max(finite, default=0) / LOG_FROM


def find_panels(histories: list[History]) -> dict[str, dict[int, Points]]:
    """Find the title of each panel, and the curve of each run (by its number) that has one."""
    titles = dict.fromkeys([VALIDATION, LOSS, *(title for history in histories for title in history.curves)])
    found = {title: {run: h.curves[title] for run, h in enumerate(histories) if title in h.curves} for title in titles}
    return {title: curves for title, curves in found.items() if curves}


def draw_training(out: Path, histories: list[History], dark: bool = False) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    with draw_panels(out, find_panels(histories), dark) as (figure, panels):
        for panel, curves in panels:
            for run, (steps, values) in curves.items():
                dots = {"marker": "o", "markersize": 4} if len(steps) < 20 else {}
                panel.plot(steps, values, label=histories[run].label, **line_style(run), **dots)
            panel.set(xlabel="step")
            panel.margins(x=0.02)
            panel.set_xlim(left=0)
            if wants_log([values for _, values in curves.values()]):
                # Ticks at 1, 2, 3, 5, 10 … in plain numbers: a loss often spans less than a power of ten.
                panel.set(title=f"{panel.get_title(loc='left')} (log axis)", yscale="log")
                panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
                panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                panel.yaxis.set_minor_locator(NullLocator())
        drawn = [panel.get_legend_handles_labels() for panel, _ in panels]
        handles = {label: handle for found in drawn for handle, label in zip(*found, strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(3, len(handles)))
