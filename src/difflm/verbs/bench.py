"""`difflm bench`."""

from typing import Annotated, Any

import typer

from difflm.console import Bar, put_json, put_table
from difflm.verbs.shared import Device, Json, Steps, load, told


@told
def bench(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="A bundled model or the directory of a run.")] = "e2e",
    steps: Steps = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """How fast this machine trains and writes: about half a minute on two cores."""
    from difflm.speed import Bench

    lm = load(model, device)
    lm.sampling(steps=steps)  # refuses before anything is measured
    with Bar("measuring") as bar:
        report = Bench(model, lm, steps).report(bar.update)
    put_json(report) if as_json else show(report)


def show(report: dict[str, Any]) -> None:
    from rich.table import Table

    machine, matmul, load = report["machine"], report["matmul"], report["loading"]
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    about = f"{machine['processor']}, {machine['threads']} of {machine['cores']} cores, torch {machine['torch']}"
    table.add_row("machine", machine["device"], about)
    about = f"of one {matmul['size']:,} × {matmul['size']:,} matrix product, {matmul['dtype']}"
    table.add_row("matmul", f"{matmul['gflops']:,g} GFLOP/s", about)
    table.add_row("loading", f"{load['seconds']:g} s", f"{load['model']}, {load['parameters'] / 1e6:.1f}M parameters")
    for part in (report["training_small"], report["training_recipe"]):
        size = f"{part['model']}, {part['parameters'] / 1e6:.1f}M parameters"
        about = f"{size}, {part['texts']} texts of {part['words']} words a step, {part['precision']}"
        table.add_row("training", f"{part['tokens_per_second']:,.0f} tokens/s", about)
    for part in (report["sampling_one"], report["sampling_tile"]):
        together = "one text at a time" if part["texts"] == 1 else f"{part['texts']:,} texts together"
        about = f"{part['model']}, {together}, {part['positions']} positions, {part['steps']} steps"
        table.add_row("sampling", f"{part['texts_per_second']:,g} texts/s", about)
    put_table(table)
