"""`difflm data list` and `difflm data fetch`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from difflm.app.commands.options import Json, report_errors
from difflm.app.console import Bar, note, put_json

if TYPE_CHECKING:
    from difflm.data.catalogue import Corpus

data_app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, epilog="Example: difflm data list")

Out = Annotated[
    Path,
    typer.Option(metavar="DIR", envvar="DIFFLM_DATA", help="Where the corpora go, each in a directory of its own."),
]


@data_app.command("list", epilog="Example: difflm data list --json")
@report_errors
def list_corpora(as_json: Json = False) -> None:
    """The public corpora: home, licence, what is known of their files, what difflm trains on."""
    from difflm.data.catalogue import CATALOGUE

    for corpus in CATALOGUE.values():
        put_json(record(corpus)) if as_json else print(described(corpus))


def described(corpus: "Corpus") -> str:
    terms = f"{corpus.licence} (research only)" if corpus.research_only else corpus.licence
    got = f"can be fetched; {corpus.checks}" if corpus.downloads else f"cannot be fetched: {corpus.obtain}"
    trains = f"difflm train {corpus.train.format(out='DIR')}" if corpus.train else ""
    read = trains or corpus.read_by or "difflm does not read it yet"
    lines = (f"{corpus.title} · {corpus.purpose}", f"{terms} · {corpus.home}", got, read)
    return "\n".join(f"{name:16} {line}" for name, line in zip((corpus.name, "", "", ""), lines, strict=True))


def record(corpus: "Corpus") -> dict[str, Any]:
    return {
        "name": corpus.name,
        "title": corpus.title,
        "purpose": corpus.purpose,
        "home": corpus.home,
        "licence": corpus.licence,
        "research_only": corpus.research_only,
        "fetched": bool(corpus.downloads),
        "obtain": corpus.obtain or None,
        "train": corpus.train or None,
        "read_by": corpus.read_by or None,
        "files": [
            {"file": kept.file, "url": download.url, "inside": kept.inside, "size": kept.size, "sha256": kept.sha256}
            for download in corpus.downloads
            for kept in download.kept
        ],
    }


@data_app.command("fetch", epilog="Example: difflm data fetch e2e --out data")
@report_errors
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A corpus of `difflm data list`.")],
    out: Out = Path("data"),
    as_json: Json = False,
) -> None:
    """Fetch a corpus from its public home. A download that broke goes on where it stopped."""
    from difflm.data.catalogue import find_corpus
    from difflm.data.fetch import fetch_corpus, sha256_of

    corpus = find_corpus(name)
    with Bar(corpus.name) as bar:
        paths = fetch_corpus(corpus, out, tell=bar.update)
    for path in paths:
        size, digest = path.stat().st_size, sha256_of(path)
        if as_json:
            put_json({"corpus": corpus.name, "file": str(path), "size": size, "sha256": digest})
        else:
            print(f"{path}: {size:,} bytes, sha256 {digest}")
    if as_json:
        return
    note(f"{corpus.title}: {corpus.licence}{', research only' if corpus.research_only else ''}. {corpus.home}")
    if corpus.train:
        print(f"Next: difflm train {corpus.train.format(out=shlex.quote(str(out)))} --out run")
