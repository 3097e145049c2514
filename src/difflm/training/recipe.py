"""Recipes: a YAML file with a method, a data set, sizes and a budget, and `key=value` changes to it."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from difflm.data.corpora import PAIRS, split_paths
from difflm.data.texts import LONGEST, MOST_TOKENS
from difflm.data.tokenizers import PretrainedTokenizer, is_pretrained
from difflm.errors import DifflmError, UsageError, explain_faults, first_line, suggest
from difflm.methods import METHODS, Method
from difflm.runtime.files import Json, check_regular, read_checked
from difflm.training.run import initial_run

Changes = Sequence[str] | Mapping[str, Any]  # of a recipe: "key=value" each, or values by key
TOKENIZERS = ("words", "bpe", "characters")  # those that are learned from texts
SIZES = ("hidden", "layers", "encoder_layers", "heads")  # shared by the networks of several methods
# Settings of training that no weight's shape depends on.
UNWEIGHTED = ("dropout", "context", "gaps", "in_order", "coupled", "behind", "path_temperature", "remembers")
ADDED = ("quality_head",)  # optional parts that a model may have in addition to those of its initial run

MOST_BYTES = 1 << 16  # of a recipe: the YAML parser takes seconds for deep nesting
# What the YAML parser raises: its own errors, and others for invalid dates, numbers of 5,000 digits and deep lists.
NOT_YAML = (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError, ArithmeticError)


class Recipe(BaseModel):
    """Everything that determines a training run. The model's sizes are under `model`; docs/verbs/train.md explains all
    keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    method: str
    model: Json = Field(default_factory=dict)
    init: str | None = None  # a bundled model or a run whose tokenizer and weights this run starts from

    data: str  # a corpus, files, a folder, a pattern, several with | between them, SOURCES,TARGETS, an address, hf:NAME
    column: str | None = None  # with the text; with sources, SOURCE,TARGET
    chunk: int = Field(default=0, ge=0, le=512)  # characters of a text that a .txt file is cut into; 0: lines
    split: int = Field(default=0, ge=0)  # characters above which a text is cut at the end of a sentence; 0: never
    tokenizer: str = "bpe"  # one of TOKENIZERS; or a run, or the directory of a Hugging Face tokenizer
    vocabulary: PositiveInt = 2000  # BPE tokens at most
    more_than: int = Field(default=10, ge=0)  # words that occur more often than this enter the vocabulary
    longest: int = Field(default=0, ge=0, le=LONGEST)  # tokens of a text at most; 0: enough for 99 % of the texts
    rows: Literal["texts", "packed"] = "texts"  # packed: `longest` tokens, filled with texts that do not attend others
    source_longest: int = Field(default=0, ge=0, le=MOST_TOKENS)  # 0: enough for 99 % of the sources
    source_words: Literal["shared", "own"] = "shared"  # own: sources have their own vocabulary
    # seq2seq: texts are written from sources; auto: if the method or the data require it.
    task: Literal["auto", "seq2seq", "span-denoising", "prompts", "conversations"] = "auto"
    distinct: bool = False  # train on each text only once, even if the file repeats it
    licence: str = ""  # of the data, for the model card

    # Adapters of this rank (LoRA) are learned, and the weights that the model starts from stay as they are; 0: none.
    lora: int = Field(default=0, ge=0, le=1024)
    alpha: PositiveFloat | None = None  # their products are multiplied by alpha / lora; None: by 2
    targets: tuple[str, ...] = ()  # the layers that have one, such as q_proj; none: all linear layers of the blocks

    temperature: PositiveFloat | None = None  # of sampling, by default; None: the method's own

    steps: int = Field(ge=0)  # 0: as many as fit into `minutes`
    minutes: PositiveFloat = 10.0  # with steps=0, of the whole command, from reading the texts to saving the model
    batch_size: int = Field(default=64, ge=2)
    lr: PositiveFloat = 1e-3
    warmup: int = Field(default=500, ge=0)
    decay: Literal["linear", "cosine", "none"] = "cosine"
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, ge=0)
    accumulate: PositiveInt = 1
    # Activation checkpointing of the blocks; light: only norms are recomputed, if the network is compiled.
    recompute: bool | Literal["light"] = False
    ema: float = Field(default=0.999, ge=0, lt=1)
    precision: Literal["auto", "bf16", "fp32"] = "auto"  # auto: bf16 on a GPU, fp32 elsewhere
    compile: bool = True  # on a GPU: faster steps, but a minute longer to start
    # Canvas widths of batches of similar lengths; empty: multiples of 8 on a CPU, the longest alone on a GPU.
    widths: tuple[PositiveInt, ...] = ()
    seed: int = Field(default=0, ge=0, lt=2**31)
    log: Literal["none", "tensorboard", "wandb"] = "none"  # in addition to metrics.jsonl
    log_every: PositiveInt = 100
    save_every: PositiveInt = 1000
    validate_every: PositiveInt = 1000
    sample_every: int = Field(default=2000, ge=0)
    patience: int = Field(default=0, ge=0)  # validations without improvement; the best weights are kept. 0: to the end

    @property
    def scaling(self) -> float:
        """The alpha of adapters."""
        return self.alpha or 2.0 * self.lora

    def rate(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, then decay to zero at the last step."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return self.decayed(1 - (step - self.warmup) / max(1, self.steps - self.warmup))

    def decayed(self, left: float) -> float:
        """The learning rate after warm-up, where this share of the steps is left."""
        shape = {"none": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}
        return self.lr * shape[self.decay]

    def adapt_to(self, device: str) -> "Recipe":
        """The recipe with the precision for a device ("cuda", "cpu"), and compiled only on a GPU."""
        on_gpu = device == "cuda"
        precision = self.precision if self.precision != "auto" else "bf16" if on_gpu else "fp32"
        return self.model_copy(update={"precision": precision, "compile": on_gpu and self.compile})

    def build_method(self) -> Method:
        return METHODS[self.method](**self.model)

    @property
    def has_sources(self) -> bool:
        """Whether texts are written from a source."""
        if self.task == "prompts":
            return True
        known = METHODS[self.method].task
        pairs = self.data in PAIRS or len(split_paths(self.data)) > 1
        asked = self.task != "auto" or self.source_longest > 0 or self.source_words == "own" or pairs
        return known == "seq2seq" or (known == "either" and asked)


def known_recipes() -> dict[str, Path]:
    """Recipes that come with the package, by name."""
    folder = Path(str(resources.files("difflm") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(name_or_path: str, changes: Changes = (), note: Callable[[str], None] = lambda text: None) -> Recipe:
    """Load a bundled recipe or a file, with changes; all errors are reported at once. `note` is called for
    lines of the recipe that do not apply to the method or the data that the changes name."""
    values, given = _read(name_or_path), read_changes(changes)
    begins = values.get("model.pretrained") == ""  # a recipe that starts from somebody else's model
    if begins and given.get("init"):
        given["model.pretrained"] = given.pop("init")
    key = "model.pretrained" if begins else "init"
    adapts = begins and METHODS[str(values["method"])].kind == "adapter"
    if adapts and given.get(key):
        given[key] = str(Path(str(given[key])).resolve())
    elif given.get(key) and is_pretrained(Path(str(given[key]))):  # an open model with its own tokenizer
        theirs = given.pop(key)
        method = str(given.get("method", values.get("method")))
        if method in METHODS and "pretrained" not in METHODS[method].model_fields:
            able = ", ".join(name for name, one in METHODS.items() if "decoder" in one.model_fields)
            raise UsageError(
                f"{key}={theirs}: {method} cannot start from somebody else's model; give method=, one of {able}."
            )
        given = {"model.pretrained": theirs, "tokenizer": theirs, **given}
    elif begins:
        raise UsageError(
            f"{name_or_path} starts from somebody else's {'diffusion' if adapts else 'left-to-right'} model: give "
            "model.pretrained=DIR, a directory with its config.json, safetensors and tokenizer.json."
        )
    if "minutes" in given and given.get("steps"):
        raise UsageError(f"minutes={given['minutes']} and steps={given['steps']} both say how long: give one of them.")
    if "minutes" in given:
        given["steps"] = 0
    dropped = _drop_foreign(values, given)
    if given.get("init"):  # the recipe's sizes are for another initial run; sizes among the changes still apply
        theirs = _sizes_of(given["init"], given.get("method", values.get("method")))
        kept = {key: values[key] for key in values if key.removeprefix("model.") in (*UNWEIGHTED, *ADDED)}
        values = {key: value for key, value in values.items() if not key.startswith("model.")} | theirs | kept
    elif values.get("init"):
        values = _sizes_of(values["init"], values.get("method")) | values
    recipe = check(values | given)
    if recipe.init is not None:
        check_init(recipe)
    elif recipe.tokenizer not in TOKENIZERS:
        check_tokenizer(recipe)
    for message in dropped:  # last, so that an error is one line
        note(message)
    return recipe


def _drop_foreign(values: Json, given: Json) -> list[str]:
    """Drop from a recipe the sizes that another method does not have, and the licence of data that are not used."""
    messages = []
    if method := METHODS.get(str(given.get("method"))):
        sizes = [key.removeprefix("model.") for key in values if key.startswith("model.")]
        if foreign := [key for key in sizes if key not in method.model_fields]:
            messages.append(f"{method.name} has no {', '.join(foreign)}: that part of the recipe is ignored.")
        for key in foreign:
            del values[f"model.{key}"]
    replaced = any(values.get(key) and given.get(key, values[key]) != values[key] for key in ("data", "init"))
    if replaced and values.get("licence") and "licence" not in given:
        licence = values.pop("licence")
        messages.append(f"{licence} is the licence of the recipe's own data. Give licence=NAME for yours.")
    return messages


def flatten(values: Mapping[str, object]) -> Json:
    """Values by their whole keys: {"model": {"hidden": 256}} is model.hidden."""
    found: Json = {str(key): value for key, value in values.items() if key != "model"}  # YAML's keys: any kind
    sizes = values.get("model") or {}  # may be empty in a file
    if not isinstance(sizes, Mapping):
        raise UsageError(f"recipe: `model` should hold `key: value` lines, not {type(sizes).__name__}.")
    return found | {f"model.{key}": value for key, value in sizes.items()}


def read_changes(changes: Changes) -> Json:
    """Changes by their whole keys."""
    pairs = changes.items() if isinstance(changes, Mapping) else map(split_change, changes)
    found = flatten({key: str(value) if isinstance(value, Path) else value for key, value in pairs})
    return found | ({"init": None} if found.get("init") == "none" else {})


def spell_changes(changes: Changes) -> list[str]:
    """Changes as a command gives them."""
    found = read_changes(changes).items()
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in found]


def split_change(change: str) -> tuple[str, object]:
    key, equals, text = change.partition("=")
    if not equals:
        texts = f" To train on its texts, give data={change}." if os.path.exists(change) else ""
        raise UsageError(f"{change!r} is not of the form key=value, such as steps=2000.{texts}")
    key = key.strip()
    if key in ("data", "column"):  # no YAML: *.txt, [a].txt, a column called 2
        return key, text or None
    try:
        value = yaml.safe_load(text)
    except NOT_YAML:
        raise UsageError(f"the value of {change[:100]!r} cannot be read.") from None
    with suppress(ValueError):  # YAML 1.1 parses 3e-4 as a string; here it is a number
        value = float(text) if isinstance(value, str) else value
    return key, value


def _sizes_of(init: object, method: object) -> Json:
    """The settings in which a recipe must agree with the run that it starts from."""
    theirs = initial_run(str(init))
    if theirs["method"] == method:
        return theirs
    ours = METHODS.get(str(method))
    if ours is None or theirs["method"] not in ours.begins_with:
        raise UsageError(f"init={init} is a {theirs['method']} model; this recipe trains {method}.")
    alike = issubclass(ours, METHODS[theirs["method"]])
    shared = set(ours.model_fields) - {*UNWEIGHTED} if alike else SIZES
    kept = [key for key in theirs if not key.startswith("model.") or key.removeprefix("model.") in shared]
    return {key: theirs[key] for key in kept} | {"method": method}


def check_init(recipe: Recipe) -> None:
    """Reject an initial run of a method that this one cannot start from, or of other sizes."""
    ours = flatten({**dict(recipe), "model": recipe.build_method().model_dump()})
    for key, value in _sizes_of(recipe.init, recipe.method).items():
        name = key.removeprefix("model.")
        if name not in UNWEIGHTED and (value or name not in ADDED) and ours[key] != value:
            raise UsageError(f"init={recipe.init} has {key}={value}, not {ours[key]}: leave {key} out.")


def check_tokenizer(recipe: Recipe) -> None:
    """Reject a tokenizer unless it is a Hugging Face one, or that of a run with the same kind of sources."""
    folder = Path(recipe.tokenizer)
    if is_pretrained(folder):
        if recipe.task == "prompts" or recipe.source_words == "own":
            asked = "task=prompts asks for words" if recipe.task == "prompts" else "source_words=own asks for two"
            raise UsageError(f"tokenizer={recipe.tokenizer} splits words into pieces; {asked}. Give tokenizer=words.")
        PretrainedTokenizer.read(folder)
        return
    if folder.is_dir() and not (folder / "tokenizer.json").exists():
        raise UsageError(f"{folder} holds no tokenizer.json: a fast tokenizer's save_pretrained writes one.")
    try:
        theirs = initial_run(recipe.tokenizer)
    except DifflmError as error:
        known = ", ".join(TOKENIZERS)
        raise UsageError(f"tokenizer={recipe.tokenizer} is none of {known}, nor a run: {error}") from None
    if recipe.has_sources and theirs["source_words"] != recipe.source_words:
        raise UsageError(f"tokenizer={recipe.tokenizer} goes with source_words={theirs['source_words']}.")


def check(values: Mapping[str, object]) -> Recipe:
    """The recipe of these values; sizes of the model may be nested, or have whole keys."""
    if values.get("data") is None:
        raise UsageError(
            "this recipe trains on your own texts: give data=FILE, such as data=my.txt (a classifier: my.jsonl)."
        )
    given = flatten(values)
    sizes = {key.removeprefix("model."): given.pop(key) for key in [*given] if key.startswith("model.")}
    try:
        recipe = Recipe(**given, model=sizes)
        if recipe.method not in METHODS:
            hint = suggest(recipe.method, METHODS, quoted=False)
            raise UsageError(f"unknown method {recipe.method!r}. {hint}Known: {', '.join(METHODS)}.")
        if fault := _find_fault(recipe):
            raise UsageError(f"recipe: {fault}.")
        return recipe
    except ValidationError as error:
        method = METHODS.get(str(values.get("method")))
        keys = [*Recipe.model_fields, *(f"model.{key}" for key in (method.model_fields if method else {}))]
        faults = explain_faults(error.errors(), keys, "model." if error.title != "Recipe" else "")
        raise UsageError(f"recipe: {faults}") from None


def read_recipe(run: Path) -> Json:
    """The recipe of a run that is resumed, with the settings chosen for it, as values."""
    path = run / "recipe.json"
    if not path.exists():
        raise UsageError(f"{run} holds no run to resume. Start it without --resume.")
    found = read_checked(path)
    if not isinstance(found, dict):
        raise DifflmError(f"{path} does not hold a recipe.")
    return {key: value for key, value in found.items() if key != "format"}


def _read(name_or_path: str) -> Json:
    bundled = known_recipes()
    path = bundled.get(name_or_path) or Path(name_or_path)
    try:
        check_regular(path)
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path} is not a recipe: it has more than {MOST_BYTES:,} bytes.")
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        beside = os.listdir(path.parent) if path.parent.is_dir() else []
        near = get_close_matches(path.name.lower(), dict.fromkeys([*bundled, *beside]))
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(f"no recipe {name_or_path!r}, and no such file. {hint}Recipes: difflm methods.") from None
    except (OSError, *NOT_YAML) as error:
        raise UsageError(f"{path} is not a readable recipe: {first_line(error)}.") from None
    if not isinstance(values, dict):
        raise UsageError(
            f"{path} is not a recipe: it should hold `key: value` lines. Texts are .txt, .csv or .jsonl files."
        )
    return flatten(values)


Fault = tuple[object, str]  # what may be wrong, and the message if it is


def _find_fault(recipe: Recipe) -> str:
    """What two settings contradict each other in, or a setting and the method; "" if nothing."""
    name, method, reads, own = recipe.method, METHODS[recipe.method], recipe.has_sources, recipe.source_words == "own"
    wide = reads and method.kind != "adapter" and recipe.longest + recipe.source_longest > MOST_TOKENS
    prompts, spans = recipe.task == "prompts", recipe.task == "span-denoising"
    pieces = prompts and recipe.tokenizer in TOKENIZERS[1:]
    parallel = not reads and len(split_paths(recipe.data)) > 1
    fault = method(**recipe.model).find_fault()
    faults: tuple[Fault, ...] = (
        (recipe.longest == 1, "longest: should be at least 2, or 0 to choose it from the texts"),
        (fault, fault),
        *_find_adapter_faults(recipe, method.kind),
        (prompts and not method.reads_prompts, f"task: {name} reads no prompts; autoregressive does"),
        (pieces, "task: prompts are made of whole words: give tokenizer=words"),
        (spans and not reads, f"task: {name} reads no sources, which span-denoising needs"),
        (reads and recipe.chunk and not spans, f"chunk: pieces of a file have no source, and {name} needs one"),
        (reads and recipe.split, "split: texts written from a source are not split. Leave it out"),
        (wide, f"longest and source_longest: at most {MOST_TOKENS} together"),
        (not reads and recipe.source_longest, f"source_longest: {name} reads no sources. Leave it out"),
        (not reads and own, f"source_words: {name} reads no sources. Leave it out"),
        (own and method.one_canvas, f"source_words: {name} has one embedding for both sides. Leave it out"),
        (own and spans, "source_words: in span-denoising, source and text are one text. Leave it out"),
        (parallel, f"data: {name} reads no sources. Name one file, not {recipe.data}"),
        *(_find_packing_faults(recipe) if recipe.rows == "packed" else ()),
    )
    return next((said for wrong, said in faults if wrong), "")


def _find_adapter_faults(recipe: Recipe, kind: str) -> list[Fault]:
    begun, lora = recipe.init or recipe.model.get("pretrained"), recipe.lora
    other = recipe.init and lora and initial_run(recipe.init)["method"]
    chats = "conversations are for somebody else's chat model: difflm train chat model.pretrained=DIR"
    return [
        (lora and not begun, "lora: adapters are of a trained model: give init=MODEL or model.pretrained=DIR"),
        (other and other != recipe.method, f"lora: init is a {other} model: give method={other}"),
        (kind == "adapter" and not lora, "lora: somebody else's model itself stays as it is: give lora=16"),
        ((recipe.alpha or recipe.targets) and not lora, "alpha, targets: these are of adapters: give lora=16, too"),
        (recipe.task == "conversations" and kind != "adapter", f"task: {chats}"),
    ]


def _find_packing_faults(recipe: Recipe) -> list[Fault]:
    begun = recipe.model.get("pretrained")
    able = [name for name, one in METHODS.items() if (one.packs_pretrained if begun else one.packs)]
    who = f"{recipe.method}{' with model.pretrained' if begun else ''}"
    change = "distinct=false" if recipe.distinct else "widths=[]"
    all_wide = f"packed rows hold all texts and have one width, longest. Give {change}"
    in_order = "packed rows are not read in order. Give rows=texts"
    return [
        (recipe.method not in able, f"rows: {who} reads one text per row. These read packed rows: {', '.join(able)}"),
        (recipe.has_sources, "rows: packed rows have no sources. Leave rows=packed out"),
        (recipe.model.get("in_order"), f"model.in_order: {in_order}"),
        (recipe.distinct or recipe.widths, f"rows: {all_wide}"),
    ]
