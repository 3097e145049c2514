"""`difflm generate`."""

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from difflm.console import Bar
from difflm.errors import UsageError
from difflm.verbs.shared import (
    Clamp,
    Device,
    Json,
    NoiseTemperature,
    NoiseTopP,
    Sampler,
    Seed,
    Steps,
    Temperature,
    told,
)

if TYPE_CHECKING:
    from difflm.pipeline import TextDiffusion


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
