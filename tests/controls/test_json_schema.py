"""JSON schemas: what their automata accept against another validator, and what is refused."""

import itertools
import json
import random
import re
import time
from datetime import date, datetime
from ipaddress import IPv4Address
from typing import Annotated, Literal
from uuid import UUID

import numpy as np
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from difflm import Json, TextDiffusion
from difflm.app.cli import app
from difflm.app.commands.writing import make_request
from difflm.controls.patterns.json_schema import FORMATS, USUAL_LENGTH, is_json_of, schema_tree
from difflm.controls.patterns.regular import CharacterAutomaton, compile_characters
from difflm.errors import UsageError
from tests.support.tiny import tiny_run

LETTERS = [*map(chr, range(9, 14)), *map(chr, range(32, 127)), "é", "٣", "\u2028", "\ufeff"]

words = st.text(st.sampled_from('ab" \\é\n'), max_size=3)
bounds = st.integers(-130, 130)
leaves = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["integer", "null"]}, {"type": "number"}]),
    st.tuples(st.integers(0, 3), st.integers(3, 5)).map(
        lambda n: {"type": "string", "minLength": n[0], "maxLength": n[1]}
    ),
    st.sampled_from(["^a+$", r"\d", r"^\w{2}[^\s]", "^[a-c -]*$", r"(x|\W).$", r"^\s\S\D", "^.$"]).map(
        lambda p: {"type": "string", "pattern": p}
    ),
    st.lists(
        st.one_of(words, st.integers(-9, 9), st.none(), st.booleans(), st.just([1.5, {"a": "b"}])), min_size=1
    ).map(lambda v: {"enum": v}),
    words.map(lambda v: {"const": v}),
    st.tuples(bounds, bounds, st.sampled_from(["integer", "number"])).map(
        lambda n: {"type": n[2], "minimum": min(n[:2]), "exclusiveMaximum": max(n[:2]) + 1}
    ),
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
        st.tuples(inner, st.integers(0, 2), st.integers(2, 3)).map(
            lambda n: {"type": "array", "items": n[0], "minItems": n[1], "maxItems": n[2]}
        ),
        st.tuples(st.dictionaries(words, inner, max_size=4), st.randoms(use_true_random=False)).map(
            lambda n: {"type": "object", "properties": n[0], "required": [key for key in n[0] if n[1].random() < 0.5]}
        ),
    ),
    max_leaves=5,
)


def draw_text(automaton: CharacterAutomaton, chance: random.Random, most: int = 30) -> str:
    """An accepted text: at random, and after `most` characters the shortest way to an end."""
    table, dead = automaton.table, len(automaton.table) - 1
    far = np.where(automaton.accepting, 0, 10**6)
    while (nearer := np.minimum(far, far[table].min(1) + 1)).sum() < far.sum():
        far = nearer
    chars = sorted(automaton.columns)
    state, text = 0, ""
    while not automaton.accepting[state] or (len(text) < most and chance.random() < 0.8):
        ways = [c for c in chars if table[state, automaton.columns[c]] != dead]
        if not ways:
            break
        if len(text) >= most:
            ways = [min(ways, key=lambda c: far[table[state, automaton.columns[c]]])]
        text += chance.choice(ways)
        state = table[state, automaton.columns[text[-1]]]
    return text


@given(schemas, st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_accepted_texts_are_valid(schema, seed):
    automaton, chance = compile_characters(schema_tree(schema), LETTERS), random.Random(seed)
    for _ in range(3):
        text = draw_text(automaton, chance)
        assert automaton.accepts(text)
        assert is_json_of(text, schema), (schema, text)


@given(bounds, bounds, st.booleans(), st.booleans())
@settings(max_examples=12, deadline=None)
def test_ranges_hold_all_their_numbers_and_no_others(low, high, above, below):
    """Every quarter of a number from −140 to 140."""
    keys = {"exclusiveMinimum" if above else "minimum": low, "exclusiveMaximum" if below else "maximum": high}
    for kind in ("integer", "number"):
        schema = {"type": kind, **keys}
        try:
            automaton = compile_characters(schema_tree(schema), "0123456789.-")
        except UsageError:
            automaton = compile_characters("x", "x")
        for quarter in range(-560, 561):
            value = quarter // 4 if quarter % 4 == 0 else quarter / 4
            assert automaton.accepts(json.dumps(value)) == is_json_of(json.dumps(value), schema), (schema, value)


def test_objects_leave_out_what_is_not_required_and_keep_the_order():
    properties = {key: {"const": n} for n, key in enumerate("abc")}
    for required, texts in (
        ([], {"{}", '{"a": 0}', '{"b": 1}', '{"c": 2}', '{"a": 0, "b": 1}', '{"a": 0, "c": 2}', '{"b": 1, "c": 2}'}),
        (["b"], {'{"b": 1}', '{"a": 0, "b": 1}', '{"b": 1, "c": 2}'}),
    ):
        schema = {"type": "object", "properties": properties, "required": required}
        automaton, chance = compile_characters(schema_tree(schema), LETTERS), random.Random(0)
        whole = '{"a": 0, "b": 1, "c": 2}'
        assert {draw_text(automaton, chance) for _ in range(300)} == {*texts, whole}
        assert not automaton.accepts('{"b": 1, "a": 0}') and is_json_of('{"b":1,"a":0}', schema)


def test_named_schemas_are_followed():
    """As pydantic writes a model inside of a model."""
    schema = {"$defs": {"Size": {"enum": ["S", "M"]}}, "type": "array", "items": {"$ref": "#/$defs/Size"}}
    automaton = compile_characters(schema_tree(schema), LETTERS)
    assert automaton.accepts('["S", "M", "M"]') and automaton.accepts("[]") and not automaton.accepts('["L"]')
    assert is_json_of('["S"]', schema) and not is_json_of('["L"]', schema)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "string", "title": 5}, '5 is not of type "string"'),
        ({}, "the type is missing"),
        ({"type": "strnig"}, "'strnig' is not known"),
        ({"type": "string", "format": "hostname"}, "'hostname' is not known. Known: date, date-time"),
        ({"type": "string", "format": "date", "maxLength": 5}, "date cannot be combined"),
        ({"type": "string", "minLength": 10**6}, "0 to 1000"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, r"JSON schema, a: 'not'"),
        ({"type": "object", "required": ["a"]}, "required and not among"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "none are written"),
        ({"type": "array"}, "items is missing"),
        ({"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 2}, "minItems is above maxItems"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "cannot be combined"),
        ({"type": "string", "pattern": "^a|b$"}, "into a group"),
        ({"type": "string", "pattern": '"'}, "quotation mark"),
        ({"type": "string", "pattern": "(a"}, "closing bracket"),
        ({"type": "integer", "minimum": 0.5}, "whole number"),
        ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "no number"),
        ({"enum": []}, "not empty"),
        ({"enum": ["a"], "type": "null"}, "no value"),
        ({"$ref": "#/definitions/x"}, "not a #/\\$defs/NAME"),
        ({"$defs": {"x": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"}, "contains itself"),
        ({"oneOf": [{"type": "null"}]}, "'oneOf' is not supported"),
        (
            {
                "type": "array",
                "items": {"type": "array", "items": {"type": "string", "minLength": 999}, "minItems": 999},
                "minItems": 999,
            },
            "too large",
        ),
    ],
)
def test_what_is_not_of_the_subset_is_refused_in_a_line(schema, reason):
    begun = time.process_time()
    with pytest.raises(UsageError, match=reason) as refused:
        compile_characters(Json(schema).expression, LETTERS)
    assert "\n" not in str(refused.value) and time.process_time() - begun < 10  # a fraction of a second on an idle core


@pytest.mark.parametrize("schema", ["[1]", "{", "x", {"const": float("nan")}, {"const": {1}}])
def test_what_is_no_schema_is_refused(schema):
    with pytest.raises(UsageError, match="not a JSON object"):
        Json(schema)


@pytest.mark.parametrize("name", FORMATS)
def test_strings_of_a_format_are_valid_and_have_the_lengths_it_says(name):
    """The validator says so of texts drawn at random."""
    schema, known = {"type": "string", "format": name}, FORMATS[name]
    automaton, chance = compile_characters(schema_tree(schema), LETTERS), random.Random(0)
    for _ in range(100):
        value = json.loads(draw_text(automaton, chance, most=chance.randrange(40)))
        assert is_json_of(json.dumps(value), schema) and not is_json_of(json.dumps(f" {value}"), schema), value
        assert known["shortest"] <= len(value) <= known["longest"]


def test_every_day_of_the_calendar_is_a_date_and_no_other():
    automaton = compile_characters(schema_tree({"type": "string", "format": "date"}), LETTERS)
    for year in (1900, 1999, 2000, 2023, 2024, 2096, 2100):
        for month, day in itertools.product(range(14), range(33)):
            text = f"{year:04}-{month:02}-{day:02}"
            try:
                known = date.fromisoformat(text).year < 2100
            except ValueError:
                known = False
            assert automaton.accepts(f'"{text}"') == known, text


def test_strings_without_a_limit_have_a_usual_one():
    for schema in ({"type": "string"}, {"type": "string", "maxLength": 10**6}):
        most = USUAL_LENGTH
        automaton = compile_characters(schema_tree(schema), 'ab{}"')
        assert automaton.accepts(f'"{"a" * most}"') and not automaton.accepts(f'"{"a" * (most + 1)}"')
        assert is_json_of(f'"{"a" * (most + 1)}"', schema)  # which the schema allows
    many = {"type": "object", "properties": {f"a{k}": {"type": "string"} for k in range(25)}, "required": ["a24"]}
    assert compile_characters(schema_tree(many), LETTERS).accepts('{"a24": "b"}')  # and is not too large


def test_an_object_without_properties_is_any_object():
    schema = {"type": "object"}
    automaton, chance = compile_characters(schema_tree(schema), LETTERS), random.Random(0)
    drawn = [draw_text(automaton, chance, most=60) for _ in range(60)]
    found = [json.loads(text) for text in drawn]
    assert all(isinstance(one, dict) and is_json_of(text, schema) for one, text in zip(found, drawn, strict=True))
    assert any(found) and automaton.accepts('{"a": [1, "b"], "c_d": {"e": null}}') and automaton.accepts("{}")
    closed = compile_characters(schema_tree({**schema, "additionalProperties": False}), LETTERS)
    assert closed.accepts("{}") and not closed.accepts('{"a": 1}')


class Address(pydantic.BaseModel):
    street: str
    number: int = pydantic.Field(ge=1, le=999)


class Person(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=12)]
    born: date
    seen: datetime | None = None
    key: UUID
    page: pydantic.HttpUrl
    host: IPv4Address
    mood: Literal["good", "bad"]
    address: Address


def test_a_pydantic_class_is_a_schema():
    """What its automaton accepts, the class reads."""
    control, chance = Json(Person), random.Random(0)
    automaton = compile_characters(control.expression, LETTERS)
    for _ in range(10):
        text = draw_text(automaton, chance, most=200)
        assert Person.model_validate_json(text) and control.check(text).satisfied
    with pytest.raises(UsageError, match="nor a Pydantic class"):
        Json(int)


MENU = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6, "minLength": 1},
        "price": {"type": "integer", "minimum": 5, "maximum": 40},
        "open": {"type": "boolean"},
        "food": {"enum": ["French", "Thai"]},
    },
    "required": ["name", "price"],
}


WRITERS = [("mdlm", "bpe"), ("difflm", "bpe"), ("mdlm", "characters")]


@pytest.fixture(scope="module")
def writers(tmp_path_factory):
    """Models of characters and of byte pairs, of a text that has JSON's signs."""
    folder = tmp_path_factory.mktemp("json")
    chance = random.Random(0)
    signs = "".join(map(chr, range(33, 127)))
    (folder / "json.txt").write_text(
        "".join(f'{{"name": "{chance.choice(signs)}", "price": {chance.randrange(99)}}}\n' for _ in range(600))
    )
    made = {}
    for method, kind in WRITERS:
        size = {"vocabulary": 350} if kind == "bpe" else {}
        changes = {"steps": 1, "validate_every": 1, "save_every": 1, "tokenizer": kind, "longest": 90, **size}
        run = tiny_run(folder / kind, method, data=str(folder / "json.txt"), **changes)
        made[method, kind] = TextDiffusion.from_pretrained(run)
    return made


@pytest.mark.long
@pytest.mark.parametrize("key", WRITERS)
def test_finished_texts_are_valid(writers, key):
    for text in writers[key].generate(4, controls=[Json(MENU)], steps=3):
        assert is_json_of(text.text, MENU) and text.controls[0]["satisfied"], text.text
        assert text.controls[0]["target"] == MENU and re.match(r'\{"name": "', text.text)


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "cannot read"), ("{", "is not JSON"), ("[1]", "no JSON object"), ('{"type": "x"}', "'x' is not known")],
)
def test_the_command_reads_a_file_and_says_what_is_wrong(tmp_path, text, said):
    path = tmp_path / "schema.json"
    if text is not None:
        path.write_text(text)
    done = CliRunner().invoke(app, ["generate", "e2e", "--json-schema", str(path)], standalone_mode=False)
    assert done.return_value == 2 and said in done.output + done.stderr and "Traceback" not in done.output


def test_the_command_reads_a_schema_that_is_written_out():
    schema = {"type": "object", "properties": {"price": {"const": "//"}}, "required": ["price"]}
    (control,) = make_request({"json_schema": json.dumps(schema)}).controls()
    assert control.target == schema
    for text, said in (("{", "--json-schema is not JSON"), ('{"type": "x"}', "'x' is not known")):
        done = CliRunner().invoke(app, ["generate", "e2e", "--json-schema", text], standalone_mode=False)
        assert done.return_value == 2 and said in done.output + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("key", WRITERS)
def test_texts_of_schemas_that_nobody_chose_are_valid(writers, key):
    written = []

    @given(schemas)
    @settings(max_examples=60, deadline=None)
    def write(schema):
        try:
            made = writers[key].generate(8, controls=[Json(schema)], steps=2)
        except UsageError as error:  # signs that the model lacks, or more than it holds
            assert "no text" in str(error)
            return
        for text in made:
            assert is_json_of(text.text, schema), (schema, text.text)
        written.append(len(made))

    write()
    assert sum(written) >= 240
