"""The command `difflm`. Verbs are thin: they read options, call the library and show what it says.

Nothing here imports torch before a verb needs it. Exit codes: 0 done, 1 failed, 2 wrong usage.
"""

import functools
import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec

import typer

from difflm import __version__
from difflm.console import Bar, TrainingView, complain, note, put_json, put_table
from difflm.errors import DifflmError, UsageError

if TYPE_CHECKING:
    from difflm.pipeline import TextDiffusion

P = ParamSpec("P")

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: difflm generate e2e -n 4",
)

Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …; auto is the GPU where there is one.")]
Json = Annotated[bool, typer.Option("--json", help="For machines: one JSON object a line.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same answer.")]
Data = Annotated[Path | None, typer.Option(metavar="DIR", envvar="DIFFLM_DATA", help="Where the corpora are.")]
Draws = Annotated[int, typer.Option(help="Noise levels a text, for a bound.")]
Split = Annotated[Literal["train", "valid"], typer.Option(help="Which texts to measure on.")]
Samples = Annotated[int, typer.Option(help="Texts to generate.")]
ScoreTexts = Annotated[int, typer.Option(help="Held-out texts whose likelihood is measured.")]
Judge = Annotated[str | None, typer.Option(metavar="RUN", help="Left-to-right model that reads the samples. [judge]")]
Twin = Annotated[str | None, typer.Option(metavar="RUN", help="Autoregressive run whose samples stand beside.")]
Steps = Annotated[int | None, typer.Option(help="Denoising steps.")]
Sampler = Annotated[str | None, typer.Option(help="ancestral, ddim, ddim-half, dpm-solver, euler or heun.")]
Temperature = Annotated[float | None, typer.Option(help="Below 1: the likelier words more often.")]
NoiseTemperature = Annotated[float | None, typer.Option(help="Scale of the noise that is drawn.")]
NoiseTopP = Annotated[float | None, typer.Option(help="Keep noise inside this share of its probability.")]
Clamp = Annotated[bool | None, typer.Option("--clamp/--no-clamp", help="Snap each belief to the nearest word.")]


def told(work: Callable[P, int | None]) -> Callable[P, int]:
    """Run a verb; say in a line what went wrong, and answer with the exit code."""

    @functools.wraps(work)
    def verb(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            code = work(*args, **kwargs) or 0
            sys.stdout.flush()
            return code
        except DifflmError as error:
            complain(str(error))
            return error.exit_code
        except KeyboardInterrupt:
            complain("interrupted.")
        except BrokenPipeError:  # the reader has seen enough (`| head`)
            silence_stdout()
        except OSError as error:
            complain(f"{error.filename or 'the output'}: {error.strerror or error}.")
            silence_stdout()
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and "out of memory" not in str(error):
                raise
            complain("out of memory. Try a smaller batch_size, fewer candidates or a smaller model.")
        return 1

    return verb


def silence_stdout() -> None:
    """Let Python's last flush go nowhere: what is left in the buffer has no reader."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without £ shows a question mark, not a traceback
    try:
        code = typer.main.get_command(app).main(args=argv, prog_name="difflm", standalone_mode=False)
    except SystemExit as left:
        code = left.code
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        complain(f"{error.format_message()}\nTry: {context.command_path if context else 'difflm'} --help")
        return 2
    return code if isinstance(code, int) else 0


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"difflm {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def difflm(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    """Diffusion language models: text that forms all at once."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


# -- generate ---------------------------------------------------------------------------------------------------


@app.command(epilog="Example: difflm generate e2e -n 4 --steps 50 --seed 0")
@told
def generate(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="A bundled model or the directory of a run.")] = "e2e",
    n: Annotated[int, typer.Option("-n", "--number", help="How many texts.")] = 1,
    steps: Steps = None,
    seed: Seed = 0,
    sampler: Sampler = None,
    temperature: Temperature = None,
    noise_temperature: NoiseTemperature = None,
    noise_top_p: NoiseTopP = None,
    clamp: Clamp = None,
    clamp_below: Annotated[float | None, typer.Option(help="Clamp at times up to this one, in 0 to 1.")] = None,
    mbr: Annotated[int, typer.Option(help="Of so many candidates, the one most like the others.")] = 1,
    top_k: Annotated[int | None, typer.Option(help="Autoregressive: draw from the k likeliest words.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Autoregressive: draw from this share of probability.")] = None,
    beams: Annotated[int | None, typer.Option(help="Autoregressive: beam search.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Write texts."""
    from difflm.measuring import load

    lm = load(model, device)
    diffusion: dict[str, Any] = {
        "steps": steps,
        "sampler": sampler,
        "noise_temperature": noise_temperature,
        "noise_top_p": noise_top_p,
        "clamp": clamp,
        "clamp_below": clamp_below,
    }
    twin: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "beams": beams}
    refuse_foreign_options(lm, model, diffusion, twin)
    with Bar("writing", n) as bar:
        batches = lm.batches(n, seed, mbr, temperature=temperature, **diffusion, **twin)
        for text in in_order(batches, lambda done: bar.update("writing", done, n)):
            bar.put(json.dumps(generation_object(text), ensure_ascii=False) if as_json else str(text))


def generation_object(g: Any) -> dict[str, Any]:
    keys = ("text", "tokens", "controls", "steps", "denoiser_calls", "seconds", "seed")
    return {key: round(g.seconds, 4) if key == "seconds" else getattr(g, key) for key in keys}


def in_order(batches: Iterator[dict[int, Any]], on_done: Callable[[int], None]) -> Iterator[Any]:
    """Texts by their number, each as soon as it and all before it are there."""
    waiting: dict[int, Any] = {}
    count = following = 0
    for batch in batches:
        waiting |= batch
        count += len(batch)
        on_done(count)
        while following in waiting:
            yield waiting.pop(following)
            following += 1


def refuse_foreign_options(lm: "TextDiffusion", name: str, diffusion: dict[str, Any], twin: dict[str, Any]) -> None:
    """An option without effect would be taken for one that has some."""
    method = lm.config["method"]
    foreign, kind = (diffusion, "diffusion") if method == "autoregressive" else (twin, "autoregressive")
    given = [key for key, value in foreign.items() if value is not None]
    if given:
        raise UsageError(f"--{given[0].replace('_', '-')} is for {kind} models; {name} is {method}.")


# -- train ------------------------------------------------------------------------------------------------------


@app.command(epilog="Example: difflm train own-text data=my.txt steps=2000 --out run")
@told
def train(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A recipe's name (see: difflm methods) or a YAML file.")
    ],
    changes: Annotated[list[str] | None, typer.Argument(metavar="key=value …", help="Changes to it.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="RUN", help="Directory of the run.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and stop.")] = False,
    data: Data = None,
    device: Device = "auto",
    as_json: Json = False,
) -> int:
    """Train a model from a recipe. Ctrl-C and SIGTERM save; --resume continues."""
    from difflm.recipe import load_recipe

    resolved = load_recipe(recipe, changes or ())
    if dry_run:
        show_recipe(resolved, as_json)
        return 0
    if out is None:
        raise UsageError("where should the run go? Give --out RUN, a directory that does not hold one yet.")
    from difflm.cards import finish_run
    from difflm.fit import train_run
    from difflm.measuring import pick_device

    command = ["difflm", "train", recipe, *(changes or ()), "--out", str(out)]
    with TrainingView(out, as_json) as view:
        outcome = train_run(resolved, out, pick_device(device), view, view.reading, data, resume)
    if outcome.stopped == "interrupted":
        again = [*command, "--resume", *(["--data", str(data)] if data and not os.environ.get("DIFFLM_DATA") else [])]
        complain(
            f"stopped at step {outcome.step:,}; saved in {out}/checkpoints/step-{outcome.step}.\n"
            f"Continue: {shlex.join(again)}"
        )
        return 1
    finish_run(out, shlex.join(command))
    if as_json:
        put_json(
            {"kind": "done", "run": str(out), "step": outcome.step, "stopped": outcome.stopped, **outcome.validation}
        )
        return 0
    from difflm.cards import training_summary
    from difflm.run import read_config

    print(f"{out}: {training_summary(read_config(out))}.")
    print(f"Next: difflm generate {shlex.quote(str(out))} -n 4")
    return 0


def show_recipe(recipe: Any, as_json: bool) -> None:
    """With the method's own defaults filled in: what is printed is a recipe again."""
    import yaml

    values = {**recipe.model_dump(mode="json"), "model": recipe.build_method().model_dump(mode="json")}
    if as_json:
        put_json(values)
    else:
        print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), end="")


# -- evaluate and compare ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measuring:
    """The options that evaluate and compare share."""

    data: Data = None
    split: Split = "valid"
    samples: Samples = 1000
    score_texts: ScoreTexts = 500
    seed: Seed = 0
    draws: Draws = 8
    judge: Judge = None
    twin: Twin = None
    steps: Steps = None
    sampler: Sampler = None
    temperature: Temperature = None
    noise_temperature: NoiseTemperature = None
    noise_top_p: NoiseTopP = None
    clamp: Clamp = None
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Append the records here, not to the runs.")] = None
    device: Device = "auto"
    as_json: Json = False

    def settings(self) -> dict[str, Any]:
        """How the models are asked to write, where it is not as they would."""
        names = ("steps", "sampler", "temperature", "noise_temperature", "noise_top_p", "clamp")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def measuring(verb: Callable[..., int | None]) -> Callable[..., int | None]:
    """Give a verb the options of `Measuring`, which it gets as one argument `asked`."""
    shared = inspect.signature(Measuring).parameters
    own = [p for p in inspect.signature(verb).parameters.values() if p.name != "asked"]

    @functools.wraps(verb)
    def joined(**given: Any) -> int | None:
        asked = Measuring(**{name: given.pop(name) for name in shared})
        return verb(**given, asked=asked)

    signature = inspect.Signature([*own, *shared.values()])
    joined.__signature__ = signature  # type: ignore[attr-defined]
    joined.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return joined


@app.command(epilog="Example: difflm evaluate run --task language --data DIR --samples 1000")
@told
@measuring
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A bundled model or the directory of a run.")],
    asked: Measuring,
    task: Annotated[Literal["language"], typer.Option(help="What to measure.")] = "language",
) -> None:
    """Measure a model beside real text and the twin; append the figures to its metrics.jsonl."""
    measure_and_keep([run], asked)


@app.command(epilog="Example: difflm compare e2e runs/diffusion-lm --data DIR --samples 200")
@told
@measuring
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN …", help="Runs that were trained on the same data.")],
    asked: Measuring,
) -> None:
    """Measure several models on the same data with the same judge: one table; each keeps its figures."""
    measure_and_keep(runs, asked)


def measure_and_keep(runs: list[str], asked: Measuring) -> None:
    from difflm.measuring import keep_records, measure, show_report

    report = measure(runs, asked)
    show_report(report, asked.as_json)
    keep_records(runs, report, asked.out)


# -- score ------------------------------------------------------------------------------------------------------


@app.command(epilog="Example: difflm score e2e my.txt")
@told
def score(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A bundled model or the directory of a run.")],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Texts: .txt (a text a line), .csv or .jsonl, each also .gz.")
    ],
    column: Annotated[str | None, typer.Option(help="Column of a .csv or .jsonl file. [text]")] = None,
    seed: Seed = 0,
    draws: Draws = 16,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """How likely a model finds given texts: nats (a bound, or exact) of each, and the mean."""
    if not 1 <= draws <= 1_000_000:
        raise UsageError(f"--draws must lie between 1 and 1,000,000, not {draws}.")
    from difflm.data.texts import read_texts
    from difflm.data.tokenizers import UNK
    from difflm.measuring import load

    texts = list(read_texts(file, column))
    lm = load(run, device)
    kind = lm.model.likelihood
    if kind is None:
        raise UsageError(f"{run} ({lm.config['method']}) has no likelihood and no bound: it cannot score.")
    rows = lm.encode(texts)
    nats: list[float] = []
    with Bar("scoring", len(rows)) as bar:
        for start in range(0, len(rows), 256):
            piece = lm.score_ids(rows[start : start + 256], seed, draws, first=start).tolist()
            for text, row, value in zip(texts[start:], rows[start:], piece, strict=False):
                figures = {"nats": round(value, 4), "nats_per_token": round(value / (len(row) + 1), 4), "kind": kind}
                line = f"{value:9.3f} nats {value / (len(row) + 1):7.3f} nats/token {kind}  {text}"
                bar.put(json.dumps({"text": text, **figures}, ensure_ascii=False) if as_json else line)
            nats += piece
            bar.update("scoring", len(nats), len(rows))
    # Words and END, as everywhere: a bound in nats/token is total nats over total tokens.
    mean, per_token = sum(nats) / len(nats), sum(nats) / sum(len(row) + 1 for row in rows)
    if as_json:
        figures = {"nats": round(mean, 4), "nats_per_token": round(per_token, 4), "kind": kind}
        put_json({"mean": figures, "texts": len(nats)})
    else:
        print(f"{mean:9.3f} nats {per_token:7.3f} nats/token {kind}  mean of {len(nats):,} texts")
    unknown = sum(row.count(UNK) for row in rows)
    if unknown:
        note(
            f"{unknown:,} of {sum(map(len, rows)):,} tokens are words this model does not know: they count as one word."
        )


# -- methods and info -------------------------------------------------------------------------------------------


@app.command(epilog="Example: difflm methods --json")
@told
def methods(as_json: Json = False, device: Annotated[str, typer.Option(hidden=True)] = "auto") -> None:
    """What exists, with its recipes."""
    from rich.table import Table

    from difflm.methods import METHODS

    recipes = recipes_by_method()
    table = Table("name", "paper", "family", "kind", "bound", "recipes", box=None, pad_edge=False)
    for m in METHODS.values():
        names = recipes.get(m.name, [])
        if as_json:
            values = {"name": m.name, "paper": m.paper, "family": m.family, "kind": m.kind, "bound": m.bound}
            put_json({**values, "recipes": names})
        table.add_row(m.name, m.paper, m.family, m.kind, "yes" if m.bound else "no", ", ".join(names))
    if not as_json:
        put_table(table)


def recipes_by_method() -> dict[str, list[str]]:
    import yaml

    from difflm.recipe import known_recipes

    found: dict[str, list[str]] = {}
    for name, path in known_recipes().items():
        found.setdefault(yaml.safe_load(path.read_text(encoding="utf-8"))["method"], []).append(name)
    return found


@app.command(epilog="Example: difflm info e2e")
@told
def info(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A bundled model or the directory of a run.")] = "e2e",
    as_json: Json = False,
    device: Annotated[str, typer.Option(hidden=True)] = "auto",
) -> None:
    """What a run is: method, sizes, data, sampling defaults, measured numbers."""
    from difflm.cards import data_summary, figure, measured, token_summary, training_summary
    from difflm.methods import METHODS
    from difflm.run import find_run, read_config

    folder = find_run(run)
    config, records = read_config(folder), measured(folder)
    if as_json:
        put_json({"run": str(folder), **config, "metrics": records})
        return
    method = METHODS[config["method"]]
    rows = {
        "method": f"{method.name} ({method.paper}), {method.family}",
        "sizes": f"{config['parameters']:,} parameters: " + named(config["model"]),
        "tokens": token_summary(config),
        "data": data_summary(config),
        "training": training_summary(config),
        "command": config.get("command", "not noted"),
        "sampling": named(config["sampling"]),
    }
    for key, value in rows.items():
        print(f"{key:9} {value}")
    for record in records:
        print(f"measured  {record.get('model')}, {record.get('name')}: {figure(record)}")


def named(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())
