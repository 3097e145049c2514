"""`difflm methods` and `difflm info`."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from difflm.app.commands.options import ENGLISH, command
from difflm.app.console import complain, put_json, put_line, put_rows
from difflm.errors import UsageError, suggest
from difflm.runtime.files import Json

COLUMNS = ("name", "paper", "family", "kind", "bound", "E2E nats/token", "Multi30k BLEU", "recipes")
FIGURES = ("nats", "judge", "bleu", "div_4", "calls")
SHARED = "e2e-mdlm"  # the recipe of all token methods that have no recipe themselves


@command("methods")
def methods(name: str = "", as_json: bool = False, device: str = "auto") -> None:
    """List the methods: their papers, what was measured of them, and their recipes."""
    from difflm.methods import METHODS, list_methods, read_measured

    recipes, measured = recipes_by_method(), read_measured()
    for line in METHODS.broken.values():
        complain(f"warning: {line}")
    listed = list_methods()
    if name and name not in listed:
        raise UsageError(f"unknown method {name!r}. {suggest(name, listed)}Known: {', '.join(listed)}.")
    rows = list[tuple[str, ...]]()
    for method, row in listed.items():
        if name and method != name:
            continue
        names, own = recipes.get(method, {}), measured["methods"].get(method, [])
        claims = {key: claim for key, claim in measured["claims"].items() if method in claim["methods"]}
        if as_json:
            values = {key: row[key] for key in ("paper", "family", "kind", "bound")}
            unbound = [recipe for recipe in names if not names[recipe]]
            values |= {"measured": own, "recipes": [*names], "recipes_without_bound": unbound}
            put_json({"name": method, **values, **({"claims": claims} if name else {})})
            continue
        known = ", ".join(
            recipe if has or not row["bound"] else f"{recipe} (no bound)" for recipe, has in names.items()
        )
        figures = [show_figure(own, *place) for place in (("e2e", "nats"), ("multi30k", "bleu"))]
        about = row["paper"], row["family"], row["kind"], "yes" if row["bound"] else "no"
        rows.append((method, *about, *figures, known or f"{SHARED} method={method}"))
        if name:
            put_rows(rows, *COLUMNS)
            put_claims(own, claims)
    if not as_json and not name:
        put_rows(rows, *COLUMNS)
        put_line("\n* still learning; empty: no run under the common protocol yet. More of one: difflm methods NAME")


def show_figure(rows: Sequence[Json], task: str, figure: str) -> str:
    """What a method reached as its paper has it, without help of others."""
    plain = (row for row in rows if row["task"] == task and " " not in row["as"] and "assisted" not in row["notes"])
    row = next(plain, {})
    return f"{row[figure][0]:#.3g}{'*' * ('still learning' in row['notes'])}" if figure in row else ""


def put_claims(rows: Sequence[Json], claims: Mapping[str, Json]) -> None:
    """Print what was measured of one method, and what became of the claims of papers about it."""
    for row in rows:
        found = [f"{name} {' ± '.join(f'{x:g}' for x in row[name])}" for name in FIGURES if name in row]
        protocol = f"{row['updates']:,} updates, rate {row['rate']:g}, {row['seeds']} seeds"
        put_line(f"\n{row['task']}, {row['as']}: {', '.join(found)} ({'; '.join([protocol, *row['notes']])})")
    for key, claim in claims.items():
        put_line(f"\n{key}, {claim['paper']}: {claim['says']}\n  in the paper: {claim['published']}")
        for one in claim["results"]:
            measured = " " + " ± ".join(f"{x:g}" for x in one.get("difference", ()))
            why = f": {one['why']}" if one["why"] else ""
            pair = f"{one['better']} over {one['worse']}, {one['metric']}{measured}"
            put_line(f"  {one['task']}, {pair}: {one['verdict']}{why}")
        if not claim["results"]:
            put_line(f"  not tested yet{': ' + claim['needs'] if claim['needs'] else ''}")


def recipes_by_method() -> dict[str, dict[str, bool]]:
    """The recipes of each method, and whether what they train has a likelihood or a bound."""
    import yaml

    from difflm.methods import list_methods
    from difflm.training.recipe import known_recipes

    listed, found = list_methods(), dict[str, dict[str, bool]]()
    for name, path in known_recipes().items():
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
        row = listed[recipe["method"]]
        unbound = recipe.get("model", {}).get(row["unbound_by"])
        found.setdefault(recipe["method"], {})[name] = row["bound"] and not unbound
    return found


@command("info")
def info(run: str = ENGLISH, as_json: bool = False, device: str = "auto") -> None:
    """Describe a run: method, sizes, data, sampling defaults and measured figures."""
    from difflm.methods import METHODS
    from difflm.runtime.files import read_json
    from difflm.runtime.hub import is_open_config
    from difflm.training.model_card import figure_parts, format_values, measured, summarise
    from difflm.training.run import find_run, read_config

    folder = find_run(run)
    if is_open_config(read_json(folder / "config.json")):
        describe_open(run, folder, as_json)
        return
    config, records = read_config(folder), measured(folder)
    if as_json:
        put_json({"run": str(folder), **config, "metrics": records})
        return
    method = METHODS[config["method"]]
    rows = {
        "method": f"{method.name} ({method.paper}), {method.family}",
        "sizes": f"{config['parameters']:,} parameters: " + format_values(config["model"]),
        **summarise(config),
        "sampling": format_values(config["sampling"]),
    }
    put_rows(rows.items())
    if records:
        put_line("")
        cells = ((str(record.get("model")), str(record.get("name")), *figure_parts(record)) for record in records)
        put_rows(cells, "texts", "figure", "value", "measured on")


def describe_open(name: str, folder: Path, as_json: bool) -> None:
    """Describe somebody else's model: its family, sizes and tokens, and what it can do here."""
    from difflm.models.open_models import describe_open_model
    from difflm.training.model_card import format_values

    about = describe_open_model(folder)
    if as_json:
        put_json({"run": str(folder), **about})
        return
    noise = {"masks": "masks", "uniform": "random words", "gaussian": "word vectors"}[about["noise"]]
    name, tokens = shlex.quote(name), "missing: put its tokenizer.json here"
    if about["tokenizer_of"]:
        tokens = f"that of {about['tokenizer_of']}, from the Hub"
    can = [f'fill gaps: difflm generate {name} --infill "My dog ___ in the garden."']
    can += [f'answer: difflm generate {name} --source "Why is the sky blue?"'] if about["chat"] else []
    can += [f'score texts: difflm score {name} "Some text."'] if about["bound"] else []
    put_rows(
        {
            "family": f"{about['family']}, somebody else's model; noise: {noise}",
            "sizes": f"{about['parameters']:,} parameters: {format_values(about['shape'])}",
            "tokens": f"{about['vocabulary']:,} in the vocabulary; texts of up to {about['context']:,} tokens",
            "tokenizer": about["tokenizer"] or tokens,
            "sampling": format_values(about["sampling"]),
            "can": "\n".join([*can, "and be measured: difflm evaluate, compare, studio"]),
        }.items()
    )
