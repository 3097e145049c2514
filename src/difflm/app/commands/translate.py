"""`difflm translate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from difflm.app.commands.options import (
    CANDIDATES,
    FILES,
    Device,
    Dtype,
    Guidance,
    Guide,
    Json,
    Out,
    Run,
    check_file,
    check_names,
    check_reads_sources,
    check_values,
    is_text,
    join_others,
    load_rank,
    option,
    read_stdin,
    report_errors,
    with_options,
)
from difflm.app.commands.writing import (
    Writer,
    check_guidance,
    choose_processes,
    load_writer,
    make_request,
    open_output,
)
from difflm.app.console import complain, to_json
from difflm.errors import UsageError
from difflm.generation.requests import Request, generation_to_json

if TYPE_CHECKING:
    from difflm.generation.jobs import Generation

NOT_OF_SOURCES = ("source", "n", "infill", "edit", "keep", "strength")
PIECE = {"cpu": 64, "cuda": 4096}  # candidates that are generated together, so that the first texts appear early


@report_errors
@join_others
@with_options(asked=[key for key in Request.model_fields if key not in NOT_OF_SOURCES])
def translate(
    asked: dict[str, Any],
    run: Run,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE|TEXT", help="A source, or a file of them: one per line, or .csv or .jsonl. [standard input]"
        ),
    ] = None,
    column: Annotated[str | None, option("Column of a .csv or .jsonl file. [src]", panel=FILES)] = None,
    out: Out = None,
    rank: Annotated[
        str | None,
        option("Keep the likeliest of --candidates by the model's own bound or a run.", "bound|RUN", panel=CANDIDATES),
    ] = None,
    repairs: Annotated[
        int,
        option(
            "At most how often the ranking run, if left-to-right, repairs each candidate first.", "N", panel=CANDIDATES
        ),
    ] = 0,
    guide: Guide = None,
    guidance: Guidance = None,
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Generate a text from each source of a file, in the same order."""
    request = make_request(asked)
    check_names(device, run, None if rank == "bound" else rank, guides=guide)
    file = None if file == "-" else file
    alone = file is not None and is_text(file)
    if file is not None and not alone:
        check_file(file)
    if column is not None and (file is None or alone):
        raise UsageError("--column is for a .csv or .jsonl file: leave it out, or name one.")
    if repairs and rank in (None, "bound"):
        raise UsageError("--repairs needs a left-to-right model that ranks the candidates: give --rank RUN.")
    check_values(request)
    check_reads_sources(run)
    strength = check_guidance(guidance, [request])
    processes = choose_processes(out)
    if file is None and processes.count > 1:
        raise UsageError("several processes cannot share standard input: name a file of sources.")
    numbers, sources = ([1], [str(file)]) if alone else read_input(file, column)
    name = file or "standard input"
    lm = load_writer(run, device, dtype, guide, [request.model_copy(update={"source": sources[0]})], rank is not None)
    lm.encode_sources(sources, lambda k: "the source" if alone else f"line {numbers[k - 1]} of {name}")
    from difflm.generation.checks import warn_of_sources

    ranked = load_rank(rank, device) if rank else None
    more = {"source": sources, "guidance": strength, "rank": ranked, "repairs": repairs}
    writer = Writer(lm, [request], more)
    job, foreign = writer.job(0), lm.warn_of_language(" ".join(sources), source=True)
    for warning in dict.fromkeys((*job.warnings, *warn_of_sources(job.sources), *foreign)):
        complain(f"warning: {warning}")

    def put(number: int, text: "Generation") -> None:
        found = {"source": sources[number], **generation_to_json(text)}
        put_line(to_json(found) if as_json else " ".join(str(text).split("\n")))

    origin = {"model": run, "sources": sources, **asked, "guidance": guidance, "dtype": dtype, "guide": guide}
    origin |= {key: value for key, value in (("repairs", repairs), ("rank", rank)) if value} | {"json": as_json}
    size = max(1, PIECE.get(lm.device.type, 64) // job.each)
    bar = writer.bar(f"translating {len(sources):,} sources")
    with open_output(out, origin, processes, len(sources), bar.put) as (put_line, rows), bar:
        writer.write((range(begin, begin + size) for begin in rows[::size]), rows, bar, put)


def read_input(file: str | None, column: str | None) -> tuple[list[int], list[str]]:
    """The sources of a file, or of standard input, and their line numbers."""
    from difflm.data.texts import check_sources, read_sources

    given = check_sources(read_stdin("source"), "standard input") if file is None else read_sources(Path(file), column)
    numbers, sources = zip(*given, strict=True)
    return [*numbers], [*sources]
