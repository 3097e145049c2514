"""`difflm data list` and `difflm data fetch`."""

import shlex
from pathlib import Path

import typer

from difflm.app.commands.options import command, show_example
from difflm.app.console import Bar, note, put_json
from difflm.runtime.files import sha256_of

data_app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, epilog=show_example("data"))


@command("data list", data_app)
def list_corpora(as_json: bool = False) -> None:
    """List the public corpora: home page, licence, whether they can be downloaded, and how to train on them."""
    from difflm.data.catalogue import CATALOGUE

    for corpus in CATALOGUE.values():
        if as_json:
            files = [{"url": load.url, **one.model_dump()} for load in corpus.downloads for one in load.files]
            facts = corpus.model_dump(exclude={"convert", "downloads"})
            put_json({**facts, "fetched": bool(corpus.downloads), "files": files})
            continue
        terms = f"{corpus.licence} (research only)" if corpus.research_only else corpus.licence
        got = f"can be fetched; {corpus.checks}" if corpus.downloads else f"cannot be fetched: {corpus.obtain}"
        trains = f"difflm train {corpus.train.format(out='DIR')}" if corpus.train else ""
        read = trains or corpus.read_by or "difflm does not read it yet"
        print(f"{corpus.name:16} {corpus.title} · {corpus.purpose}")
        for line in (f"{terms} · {corpus.home}", got, read):
            print(f"{'':16} {line}")


@command("data fetch", data_app)
def fetch(name: str, out: Path = Path("data"), as_json: bool = False) -> None:
    """Download a corpus from its home page. Files are checked, and saved only when they are complete."""
    from difflm.data.catalogue import find_corpus
    from difflm.data.fetch import fetch_corpus

    corpus = find_corpus(name)
    with Bar(corpus.name) as bar:
        paths = fetch_corpus(corpus, out, progress=bar.update)
    for path in paths:
        size, digest = path.stat().st_size, sha256_of(path)
        if as_json:
            put_json({"corpus": corpus.name, "file": str(path), "size": size, "sha256": digest})
        else:
            print(f"{path}: {size:,} bytes, sha256 {digest}")
    if not as_json:
        note(f"{corpus.title}: {corpus.licence}{', research only' if corpus.research_only else ''}. {corpus.home}")
    if corpus.train and not as_json:
        print(f"Next: difflm train {corpus.train.format(out=shlex.quote(str(out)))} --out run")
