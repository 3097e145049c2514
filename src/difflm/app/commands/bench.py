"""`difflm bench`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from difflm.app.commands.options import Device, Dtype, Json, Judge, Steps, Temperature, Twin, load_model, report_errors
from difflm.app.console import Bar, note, put_json, put_table


@report_errors
def bench(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="A bundled model or the directory of a run.")] = "e2e",
    steps: Steps = None,
    temperature: Temperature = None,
    full: Annotated[bool, typer.Option("--full", help="Tables instead of samples of them: minutes.")] = False,
    only: Annotated[str | None, typer.Option(metavar="PARTS", help="Such as training,sampling. [all]")] = None,
    twin: Twin = None,
    judge: Judge = None,
    targets: Annotated[Path | None, typer.Option(metavar="FILE", help="Targets of `evaluate --task control`.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it, as .png or .svg.")] = None,
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """How fast this machine trains and writes: about half a minute on two cores."""
    if out:
        from difflm.app.commands.plot import picture_file

        picture_file("speed", out)
    from difflm.app.bench.bench import Bench, parts_of
    from difflm.app.bench.rivals import check_twin
    from difflm.app.bench.writing import TARGETS
    from difflm.app.measuring import load_judge, run_names
    from difflm.evaluation.targets import read_targets

    parts = parts_of(only)
    asked = read_targets(targets) if targets else TARGETS
    lm = load_model(model, device, dtype)
    lm.sampling(steps=steps, temperature=temperature)  # refuses before anything is measured
    rival = (run_names([twin])[0], check_twin(load_model(twin, device, dtype))) if twin else None
    reads = load_judge(judge, [lm], device) if full or judge else None
    measures = Bench(model, lm, steps, full, rival, reads, asked, temperature)
    with Bar("measuring") as bar:
        report = measures.report(parts, bar.update)
    if out:
        from difflm.app.plots.speed import draw_speed

        draw_speed(out, report)
        note(f"{out}: drawn.")
    put_json(report) if as_json else show(report)


def show(report: dict[str, Any]) -> None:
    from rich.table import Table

    machine, matmul, load_model = report["machine"], report["matmul"], report["loading"]
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    about = f"{machine['processor']}, {machine['threads']} of {machine['cores']} cores, torch {machine['torch']}"
    table.add_row("machine", machine["device"], about)
    about = f"of one {matmul['size']:,} × {matmul['size']:,} matrix product, {matmul['dtype']}"
    table.add_row("matmul", f"{matmul['gflops']:,g} GFLOP/s", about)
    table.add_row("copy", f"{report['copy']['gb_per_second']:,g} GB/s", "read and written")
    table.add_row(
        "loading",
        f"{load_model['seconds']:g} s",
        f"{load_model['model']}, {load_model['parameters'] / 1e6:.1f}M parameters",
    )
    report_errors = {
        "training": training_line,
        "sampling": sampling_line,
        "control": sampling_line,
        "growth": growth_line,
        "rivals": rival_line,
        "profile": profile_line,
    }
    for part, line in report_errors.items():
        for row in report.get(part, ()):
            table.add_row(part, *line(row))
    put_table(table)


def training_line(row: dict[str, Any]) -> tuple[str, str]:
    size = f"{row['model']}, {row['parameters'] / 1e6:.1f}M parameters"
    share = f", {row['share_of_matrix_rate']:.1%} of the matrix rate" if "share_of_matrix_rate" in row else ""
    about = f"{size}, {row['texts']:,} texts of {row['words']} words a step, {row['precision']}{share}"
    return f"{row['tokens_per_second']:,.0f} tokens/s", about


def sampling_line(row: dict[str, Any]) -> tuple[str, str]:
    together = "one text at a time" if row["texts"] == 1 else f"{row['texts']:,} texts together"
    what = [row["model"], *([row["control"]] if "control" in row else []), together]
    size = [f"{row['positions']} positions"] if "positions" in row else []
    read = [f"judge {row['judge_nats_per_token']:.2f}"] if "judge_nats_per_token" in row else []
    return f"{row['texts_per_second']:,g} texts/s", ", ".join([*what, *size, f"{row['steps']} steps", *read])


def growth_line(row: dict[str, Any]) -> tuple[str, str]:
    size = f"{row['texts']} texts of {row['positions']} positions, {row['vocabulary']:,} words, {row['steps']} steps"
    return f"{row['texts_per_second']:,g} texts/s", f"{row['along']} {row['size']:,}: {size}"


def rival_line(row: dict[str, Any]) -> tuple[str, str]:
    about = f"{row['rival']}, {row['texts']:,} together, {row.get('note') or row['decoding']}"
    read = f", judge {row['judge_nats_per_token']:.2f}" if "judge_nats_per_token" in row else ""
    return f"{row['texts_per_second']:,g} texts/s" if "seconds" in row else "-", about + read


def profile_line(row: dict[str, Any]) -> tuple[str, str]:
    floor = f"{row['times_the_floor']:g} times the floor of {row['floor_seconds'] * 1e3:g} ms"
    return f"{row['seconds'] * 1e3:,g} ms", f"a {row['step']} step of {row['model']}, {row['texts']:,} texts, {floor}"
