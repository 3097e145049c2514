"""`difflm bench`."""

from typing import Any

from difflm.app.commands.options import Dtype, check_names, command, load_model
from difflm.app.console import Bar, put_json, put_table
from difflm.errors import UsageError
from difflm.models.sampling import Sampling


@command("bench", settings=("steps", "temperature"))
def bench(
    settings: dict[str, Any], model: str = "e2e", device: str = "auto", dtype: Dtype = None, as_json: bool = False
) -> None:
    """Measure how fast this machine trains and samples: about half a minute on two cores."""
    Sampling().change(settings)
    check_names(device, model)
    from difflm.app.bench import measure

    lm = load_model(model, device, dtype)
    if lm.model.capabilities.source_limit:
        raise UsageError(f"{model} writes from sources, which bench has none of: `difflm evaluate` times those.")
    lm.sampling(**settings)  # rejects what this model does not take before anything is measured
    with Bar("measuring") as bar:
        report = measure(model, lm, bar.update, **settings)
    put_json(report) if as_json else show_report(report)


def show_report(report: dict[str, Any]) -> None:
    from rich.table import Table

    def describe_size(row: dict[str, Any]) -> str:
        return f"{row['model']}, {row['parameters'] / 1e6:.1f}M parameters"

    machine, matmul, loading = report["machine"], report["matmul"], report["loading"]
    table = Table("", "", "", box=None, pad_edge=False, show_header=False)
    table.columns[1].justify = "right"
    cores = f"{machine['threads']} of {machine['cores']} cores"
    table.add_row("machine", machine["device"], f"{machine['processor']}, {cores}, torch {machine['torch']}")
    product = f"of one {matmul['size']:,} × {matmul['size']:,} matrix product, {matmul['dtype']}"
    table.add_row("matmul", f"{matmul['gflops']:,g} GFLOP/s", product)
    table.add_row("loading", f"{loading['seconds']:g} s", describe_size(loading))
    for row in report["training"]:
        step = f"{row['texts']:,} texts of {row['words']} words per step, {row['precision']}"
        table.add_row("training", f"{row['tokens_per_second']:,.0f} tokens/s", f"{describe_size(row)}, {step}")
    for row in report["sampling"]:
        together = "one text at a time" if row["texts"] == 1 else f"{row['texts']:,} texts together"
        about = f"{row['model']}, {together}, {row['steps']} steps, {row['dtype']}"
        table.add_row("sampling", f"{row['texts_per_second']:,g} texts/s", about)
    put_table(table)
