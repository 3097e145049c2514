"""JSON schemas as regular expressions: a subset whose texts, in one fixed spelling, an automaton reads. Finished texts
are checked by `jsonschema_rs`, which knows nothing of automata.

Texts are formatted as by Python's `json.dumps`, with a space after each comma and colon. Properties are in the order of
the schema, strings contain no escapes and, unless the schema gives a limit, at most USUAL_LENGTH characters (fewer if
there are many of them), and numbers have at most fifteen digits and six decimals."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NoReturn

from difflm.controls.patterns.regular import MAX_COUNT, Chars, Either, Node, Repeated, parse_pattern, sequence
from difflm.errors import UsageError
from difflm.runtime.files import Json, read_own_table
from difflm.runtime.work import share_budget, spend_work

if TYPE_CHECKING:
    from jsonschema_rs import Draft202012Validator as Validator

Schema = Json

UNSPELT = (("\x00", "\x1f"), ('"', '"'), ("\\", "\\"))  # what a string of JSON has to escape
NOT_SAME = (("\u2028", "\u2029"), ("\ufeff", "\ufeff"))  # some readers treat these as spaces or line ends
NAMED_RANGES = {"d": (("0", "9"),), "w": (("0", "9"), ("A", "Z"), ("_", "_"), ("a", "z"))}
INSIDE = Chars(UNSPELT, negated=True)
DIGIT = Chars((("0", "9"),))
MAX_DEPTH = 40  # schemas inside of schemas
USUAL_LENGTH, LEAST_USUAL = 80, 20  # characters of a string for which the schema gives no limit
ALL_USUAL = 600  # of all such strings together, so that the automaton stays small
LARGEST = 10**15 - 1  # up to this number, all readers agree on whole numbers
FRACTION = sequence(Repeated(DIGIT, 0, 5), Chars((("1", "9"),)))  # never zero, so that bounds stay simple

_TABLE = read_own_table("json_schema.yaml", __file__)
KEYWORDS: Mapping[str, Sequence[str]] = _TABLE["keywords"]
FORMATS: Mapping[str, Json] = _TABLE["formats"]
LITERALS: Mapping[str, Node] = {"null": sequence("null"), "boolean": Either((sequence("true"), sequence("false")))}


@share_budget("JSON schema")
def schema_tree(schema: Schema) -> Node:
    """The regular expression of the texts of a schema."""
    counting = Compiler(schema, 0)
    counting.compile(schema, "", 0)
    usual = max(LEAST_USUAL, min(USUAL_LENGTH, ALL_USUAL // max(1, counting.unlimited)))
    tree = Compiler(schema, usual).compile(schema, "", 0)
    try:
        make_validator(json.dumps(schema))
    except ValueError as error:
        raise UsageError(f"JSON schema: {str(error).splitlines()[0]}.") from None
    return tree


class Compiler:
    """Reads a schema from the outside in; `at` is the current path. Strings without a limit have `usual` characters at
    most, and are counted."""

    def __init__(self, root: Schema, usual: int) -> None:
        self.root, self.usual, self.unlimited = root, usual, 0

    def refuse(self, at: str, reason: str) -> NoReturn:
        raise UsageError(f"JSON schema{f', {at[1:]}' if at else ''}: {reason}.")

    def compile(self, schema: object, at: str, depth: int) -> Node:
        spend_work(100)  # a name can stand for a schema that holds others twice, and so on
        if depth > MAX_DEPTH:
            self.refuse("", f"more than {MAX_DEPTH} schemas are nested, or one contains itself")
        if not isinstance(schema, dict):
            self.refuse(at, 'an object such as {"type": "string"} is expected')
        kinds = schema.get("type", [])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        for kind in kinds:
            if not isinstance(kind, str) or kind not in KEYWORDS:
                self.refuse(at, f"the type {str(kind)[:50]!r} is not known")
        own = next((key for key in ("$ref", "anyOf", "enum", "const") if key in schema), None)
        known = {own} if own in ("$ref", "anyOf") else {own, "type"} if own else {"type"}
        known = known.union(_TABLE["about"], *(() if own else (KEYWORDS[kind] for kind in kinds)))
        if foreign := [key for key in schema if key not in known]:
            self.refuse(at, f"{str(foreign[0])[:50]!r} is not supported")
        if own == "$ref":
            named, name, root = self.root.get("$defs"), str(schema["$ref"]), "#/$defs/"
            found = named.get(name.removeprefix(root)) if isinstance(named, Mapping) else None
            if found is None or not name.startswith(root):
                self.refuse(at, f"{name[:50]!r} is not a #/$defs/NAME of this schema")
            return self.compile(found, at, depth + 1)
        if own == "anyOf":
            options = self.listed(schema, "anyOf", at)
            return Either(tuple(self.compile(one, f"{at}.anyOf", depth + 1) for one in options))
        if own:
            values = [schema["const"]] if own == "const" else self.listed(schema, "enum", at)
            fitting = [value for value in values if not kinds or is_json_of(json.dumps(value), {"type": kinds})]
            if not fitting:
                self.refuse(at, "no value is of its type")
            return Either(tuple(sequence(json.dumps(value, ensure_ascii=False)) for value in fitting))
        if not kinds:
            self.refuse(at, "the type is missing")
        compilers: Mapping[str, Callable[[Schema, str, int], Node]] = {
            **{"string": self.compile_string, "array": self.compile_array, "object": self.compile_object},
            **{"number": self.compile_number, "integer": partial(self.compile_number, fractions=False)},
        }
        return Either(tuple(LITERALS.get(kind) or compilers[kind](schema, at, depth) for kind in kinds))

    def listed(self, schema: Schema, key: str, at: str) -> Sequence[object]:
        if not isinstance(schema[key], list) or not schema[key]:
            self.refuse(at, f"{key} must be a list that is not empty")
        return schema[key]

    def counts(self, schema: Schema, low: str, high: str, at: str) -> tuple[int, int | None]:
        """The smallest and the largest of two counts; None: the largest is above what a repetition may be."""
        for key, limit in ((low, MAX_COUNT), (high, LARGEST)):
            if not is_whole(schema.get(key, 0)) or not 0 <= schema.get(key, 0) <= limit:
                self.refuse(at, f"{key} must be a whole number from 0 to {MAX_COUNT}")
        least, most = int(schema.get(low, 0)), int(schema.get(high, LARGEST))
        if most < least:
            self.refuse(at, f"{low} is above {high}")
        return least, most if most <= MAX_COUNT else None

    def compile_string(self, schema: Schema, at: str, depth: int) -> Node:
        least, most = self.counts(schema, "minLength", "maxLength", at)
        if "format" in schema:
            known = FORMATS.get(str(schema["format"]))
            if known is None:
                self.refuse(at, f"the format {str(schema['format'])[:50]!r} is not known. Known: {', '.join(FORMATS)}")
            longest = LARGEST if most is None else most
            if "pattern" in schema or least > known["shortest"] or longest < known["longest"]:
                self.refuse(at, f"{schema['format']} cannot be combined with another pattern or such a length")
            return sequence('"', parse_pattern(known["written"]), '"')
        if "pattern" not in schema:
            self.unlimited += most is None
            return sequence('"', Repeated(INSIDE, least, max(least, self.usual) if most is None else most), '"')
        if least or most is not None:
            self.refuse(at, "pattern and a length cannot be combined: write the length into the pattern")
        if not isinstance(schema["pattern"], str):
            self.refuse(at, "pattern must be a string")
        try:
            pattern: str = schema["pattern"]
            if parse_pattern(pattern.strip("^$")).alternatives:
                self.refuse(at, "put the alternatives of the pattern into a group")
            begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
            inner = pattern[begins : len(pattern) - ends]  # which may stand anywhere, unless ^ or $ say otherwise
            whole = f"{'' if begins else '.*'}({inner}){'' if ends else '.*'}"
            return sequence('"', parse_pattern(whole, spell_inside), '"')
        except UsageError as error:
            self.refuse(at, str(error).removesuffix("."))

    def compile_number(self, schema: Schema, at: str, depth: int, fractions: bool = True) -> Node:
        """Numbers by their sign: whole ones and, with `fractions`, those between them."""
        for key in {*KEYWORDS["number"]} & {*schema}:
            if not is_whole(schema[key]) or abs(schema[key]) > LARGEST:
                self.refuse(at, f"{key} must be a whole number of at most fifteen digits")
        low = int(max(schema.get("minimum", -LARGEST), schema.get("exclusiveMinimum", -LARGEST)))
        high = int(min(schema.get("maximum", LARGEST), schema.get("exclusiveMaximum", LARGEST)))
        first = low + (schema.get("exclusiveMinimum") == low)
        last = high - (schema.get("exclusiveMaximum") == high)
        parts = list[Node]()
        for sign, least, most, begin, end in (
            ("", max(first, 0), last, max(low, 0), high),
            ("-", max(-last, 1), -first, max(-high, 0), -low),
        ):
            ways = [digits_between(least, most)]
            if fractions and (whole := digits_between(begin, end - 1)):
                ways.append(sequence(whole, ".", FRACTION))
            if any(ways):
                parts.append(sequence(sign, Either(tuple(filter(None, ways)))))
        if not parts:
            self.refuse(at, "no number is within its bounds")
        return Either(tuple(parts))

    def compile_array(self, schema: Schema, at: str, depth: int) -> Node:
        if "items" not in schema:
            self.refuse(at, "items is missing: it gives the type of the items")
        least, most = self.counts(schema, "minItems", "maxItems", at)
        if most == 0:
            return sequence("[]")
        return list_of(self.compile(schema["items"], f"{at}.items", depth + 1), least, most)

    def compile_object(self, schema: Schema, at: str, depth: int) -> Node:
        if not {"properties", "required"} & {*schema} and schema.get("additionalProperties", True) is True:
            return any_object()
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            self.refuse(at, "properties must be an object and required a list")
        if not isinstance(schema.get("additionalProperties", True), bool):
            self.refuse(at, "additionalProperties must be true or false; none are written")
        if missing := [key for key in required if not isinstance(key, str) or key not in properties]:
            self.refuse(at, f"{str(missing[0])[:50]!r} is required and not among the properties")
        own = {key: self.compile(one, f"{at}.{key}", depth + 1) for key, one in properties.items()}
        entries = [sequence(f"{json.dumps(key, ensure_ascii=False)}: ", value) for key, value in own.items()]
        return sequence("{", join_entries(entries, [key in required for key in properties]), "}")


def any_object(depth: int = 1) -> Node:
    """Any object whose values are plain or, `depth` levels deep, lists of plain ones and further objects."""
    plain = Either((sequence('"', Repeated(INSIDE, 0, LEAST_USUAL), '"'), parse_pattern(_TABLE["any_object"]["plain"])))
    inner = (list_of(plain, 0, None), any_object(depth - 1)) if depth else ()
    entry = sequence('"', parse_pattern(_TABLE["any_object"]["key"]), '": ', Either((plain, *inner)))
    return sequence("{", separated(entry, 0, None), "}")


def list_of(item: Node, least: int, most: int | None) -> Node:
    return sequence("[", separated(item, least, most), "]")


def separated(item: Node, least: int, most: int | None) -> Node:
    """So many of an item, with commas between them."""
    more = Repeated(sequence(", ", item), max(least - 1, 0), None if most is None else most - 1)
    return Repeated(sequence(item, more), int(least > 0), 1)


def join_entries(entries: Sequence[Node], required: Sequence[bool]) -> Node:
    """Entries in their order with commas between them; those that are not required may be left out."""
    later = [Repeated(sequence(", ", entry), int(must), 1) for entry, must in zip(entries, required, strict=True)]
    if True not in required:
        spend_work(len(entries) ** 2)
        return Either((sequence(), *(sequence(entry, *later[k + 1 :]) for k, entry in enumerate(entries))))
    sure = required.index(True)
    before = (Repeated(sequence(entry, ", "), 0, 1) for entry in entries[:sure])
    return sequence(*before, entries[sure], *later[sure + 1 :])


def digits_between(low: int, high: int) -> Node | None:
    """The whole numbers from `low` ≥ 0 to `high`; None: there are none."""
    sizes = range(len(str(low)), len(str(max(high, 0))) + 1)
    ends = [(max(low, 10 ** (size - 1) if size > 1 else 0), min(high, 10**size - 1)) for size in sizes]
    parts = tuple(same_length(str(least), str(most)) for least, most in ends if least <= most)
    return Either(parts) if parts else None


def same_length(low: str, high: str) -> Node:
    """The numbers between two of as many digits."""
    rest = len(low) - 1
    if rest < 0 or (low, high) == ("0" * (rest + 1), "9" * (rest + 1)):
        return Repeated(DIGIT, rest + 1, rest + 1)
    if low[0] == high[0]:
        return sequence(low[0], same_length(low[1:], high[1:]))
    first = sequence(low[0], same_length(low[1:], "9" * rest))
    last = sequence(high[0], same_length("0" * rest, high[1:]))
    if ord(high[0]) - ord(low[0]) == 1:
        return Either((first, last))
    between = Chars(((chr(ord(low[0]) + 1), chr(ord(high[0]) - 1)),))
    return Either((first, sequence(between, Repeated(DIGIT, rest, rest)), last))


def spell_inside(node: Chars) -> Chars:
    """A set without characters that a string of JSON has to escape, and with the sets that all readers of schemas know
    by their names: digits and letters are those of ASCII."""
    ranges = [*node.ranges, *(one for name in node.named for one in NAMED_RANGES.get(name.lower(), ()))]
    others, spaces = any(name.isupper() for name in node.named), "s" in node.named.lower()
    if not (node.negated or others):
        found = Chars((*ranges, (" ", " ")) if spaces else tuple(ranges))
        if found.members(sorted({'"', "\\", *map(chr, range(32))})).any():
            raise UsageError("the pattern asks for a quotation mark, a backslash or a control character.")
        return found
    if others and (node.negated or node.ranges or len(node.named) > 1):
        raise UsageError("the pattern has \\D, \\W or \\S inside [ ]: list the characters instead.")
    return Chars((*ranges, *UNSPELT, *NOT_SAME), "s" if spaces else "", True)


def is_whole(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and value == value // 1


@lru_cache(maxsize=64)
def make_validator(schema: str) -> "Validator":
    import jsonschema_rs  # late: few commands need it

    plain = {key: value for key, value in json.loads(schema).items() if key not in ("$schema", "$id")}
    return jsonschema_rs.Draft202012Validator(plain, validate_formats=True)


def is_json_of(text: str, schema: Schema) -> bool:
    """Whether a text is JSON, in any spelling, that a schema of the subset allows."""
    try:
        return bool(make_validator(json.dumps(schema)).is_valid(json.loads(text)))
    except (ValueError, RecursionError):
        return False
