"""`difflm plot schedules|embeddings|denoising|training`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import typer

from difflm.app.commands.options import ENGLISH, check_names, command, load_model, show_example
from difflm.app.console import note, put_json
from difflm.models.sampling import Sampling

plot_app = typer.Typer(
    add_completion=False,
    help="Draw pictures, as .png or .svg. Needs the extra [plot].",
    epilog=show_example("plot"),
)


@plot_app.callback(invoke_without_command=True)
def plot(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


@command("plot schedules", plot_app)
def schedules(run: str | None = None, out: Path | None = None, dark: bool = False, as_json: bool = False) -> None:
    """Plot signal, noise and log-SNR over time, for every schedule."""
    with picture("schedules", out, as_json, run) as file:
        from difflm.app.plots.schedules import draw_schedules, known_curves, learned_curve

        own = [learned_curve(run_name(run), load_model(run, "cpu"))] if run is not None else []
        draw_schedules(file, [*known_curves(), *own], dark)


@command("plot embeddings", plot_app)
def embeddings(
    model: str = "e2e",
    method: Literal["tsne", "pca"] = "tsne",
    seed: int = 0,
    out: Path | None = None,
    dark: bool = False,
    as_json: bool = False,
) -> None:
    """Draw a map of a model's word vectors, coloured by part of speech."""
    with picture("embeddings", out, as_json, model) as file:
        from difflm.app.plots.embeddings import draw_embeddings, project, word_tags, word_vectors
        from difflm.generation.checks import check_request

        check_request(1, seed)
        lm = load_model(model, "cpu")
        words, vectors = word_vectors(run_name(model), lm)
        tags = word_tags(model, lm, words)
        if tags is None:
            note("All words have one colour: parts of speech need a tagger and, for byte pairs, the texts in RUN/data.")
        how = {"tsne": "t-SNE", "pca": "PCA"}[method]
        title = f"{len(words):,} word vectors of {run_name(model)}, from {vectors.shape[1]} dimensions to 2 by {how}"
        draw_embeddings(file, words, project(vectors, method, seed), tags, title, dark)


@command("plot denoising", plot_app, settings=("steps",))
def denoising(
    settings: dict[str, Any],
    model: str = ENGLISH,
    seed: int = 0,
    out: Path | None = None,
    dark: bool = False,
    device: str = "auto",
    as_json: bool = False,
) -> None:
    """Plot how one text forms: the confidence in every word at every step, and when each word last changed."""
    Sampling().change(settings)
    with picture("denoising", out, as_json, model, device=device) as file:
        from difflm.app.plots.denoising import draw_denoising, read_denoising
        from difflm.generation.checks import check_request

        check_request(1, seed)
        text = read_denoising(drafts[0] for drafts in load_model(model, device).stream(1, seed, **settings))
        draw_denoising(file, text, f"{run_name(model)}, {text.confidence.shape[1]} steps, seed {seed}", dark)


@command("plot training", plot_app)
def training(runs: list[str], out: Path | None = None, dark: bool = False, as_json: bool = False) -> None:
    """Plot every part of the loss, and nats/token on held-out texts, over the training steps."""
    with picture("training", out, as_json, *runs) as file:
        from difflm.app.plots.training import draw_training, read_history

        draw_training(file, [read_history(run) for run in runs], dark)


@contextmanager
def picture(name: str, out: Path | None, as_json: bool, *models: str | None, device: str = "cpu") -> Iterator[Path]:
    """Refuse models that do not exist and a file that cannot be written; yield the file, and report it when it is
    drawn."""
    check_names(device, *models)
    from difflm.app.plots.canvas import check_out, need_plot_extra

    need_plot_extra()
    file = check_out(out or Path(f"{name}.png"))
    yield file
    put_json({"plot": name, "file": str(file)}) if as_json else print(file)


def run_name(name_or_path: str) -> str:
    return Path(name_or_path).resolve().name
