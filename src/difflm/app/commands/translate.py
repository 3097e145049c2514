"""`difflm translate`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difflm.app.commands.options import (
    Dtype,
    check_file,
    check_names,
    check_reads_sources,
    check_values,
    command,
    is_text,
    load_model,
    read_stdin,
)
from difflm.app.commands.writing import Writer, check_guidance, count_processes, load_writer, make_request
from difflm.app.console import Bar, complain, to_json
from difflm.errors import UsageError
from difflm.generation.requests import Request, generation_to_json

if TYPE_CHECKING:
    from difflm.generation.jobs import Generation

NOT_OF_SOURCES = ("source", "n", "infill", "edit", "keep", "strength")
PIECE = {"cpu": 64, "cuda": 4096}  # candidates that are generated together, so that the first texts appear early


@command("translate", asked=[key for key in Request.model_fields if key not in NOT_OF_SOURCES])
def translate(
    asked: dict[str, Any],
    run: str,
    file: str | None = None,
    column: str | None = None,
    out: Path | None = None,
    rank: str | None = None,
    repairs: int = 0,
    guide: list[Path] | None = None,
    guidance: str | None = None,
    device: str = "auto",
    dtype: Dtype = None,
    as_json: bool = False,
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
    if count_processes(out) > 1 and file is None:
        raise UsageError("several processes cannot share standard input: name a file of sources.")
    from difflm.data.texts import check_sources, read_sources

    given = [(1, str(file))] if alone else read_sources(Path(file), column) if file else read_stdin("source")
    numbers, sources = zip(*(given if file else check_sources(given, "standard input")), strict=True)
    name = file or "standard input"
    lm = load_writer(run, device, dtype, guide, [request.model_copy(update={"source": sources[0]})], rank is not None)
    lm.encode_sources(sources, lambda k: "the source" if alone else f"line {numbers[k - 1]} of {name}")
    from difflm.generation.checks import warn_of_sources

    ranked = load_model(rank, device) if rank and rank != "bound" else rank
    more = {"source": sources, "guidance": strength, "rank": ranked, "repairs": repairs}
    writer = Writer(lm, [request], more)
    job, foreign = writer.job(0), lm.warn_of_language(" ".join(sources), source=True)
    for warning in dict.fromkeys((*job.warnings, *warn_of_sources(job.sources), *foreign)):
        complain(f"warning: {warning}")

    def put(number: int, text: "Generation", put_line: Callable[[str], None]) -> None:
        found = {"source": sources[number], **generation_to_json(text)}
        put_line(to_json(found) if as_json else " ".join(str(text).split("\n")))

    origin = {"model": run, "sources": sources, **asked, "guidance": guidance, "dtype": dtype, "guide": guide}
    origin |= {key: value for key, value in (("repairs", repairs), ("rank", rank)) if value} | {"json": as_json}
    size, count = max(1, PIECE.get(lm.device.type, 64) // job.each), len(sources)
    pieces = (range(begin, min(begin + size, count)) for begin in range(0, count, size))
    writer.write(out, origin, pieces, put, Bar(f"translating {count:,} sources, denoising steps", writer.before[-1]))
