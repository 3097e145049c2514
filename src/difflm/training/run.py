"""A run: the directory that holds everything about one trained model. Torch is imported with its weights."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pydantic import ValidationError

from difflm.data.texts import LONGEST
from difflm.data.tokenizers import Tokenizer
from difflm.errors import DifflmError, UsageError, first_line, suggest
from difflm.machine import is_on
from difflm.methods import METHODS, TextSpec
from difflm.models.sampling import Sampling
from difflm.runtime.files import AGAIN, FORMAT, INSTALL, OF_WEIGHTS, Json, check_sha256, read_checked, read_json
from difflm.runtime.hub import is_hub_name, is_open_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from difflm.diffusion.processes import DiscreteProcess
    from difflm.models.base import LanguageModel

FORMATS = (1, FORMAT)  # 1: earlier versions, whose configs have no checksum
WRITTEN = (  # what training writes into the directory of a run
    *("config.json", "recipe.json", "tokenizer.json", "model.safetensors", "metrics.jsonl", "README.md", "wandb.json"),
    *("adapter_config.json", "adapter_model.safetensors"),
    *("data", "data/train", "data/valid", "checkpoints", "tensorboard"),
)
NOT_A_MODEL = (TypeError, ValueError, LookupError, RuntimeError, ArithmeticError, AttributeError, AssertionError)
ONE_BY_ONE = 8_000_000  # with more weights, a CPU gains little from batches of several texts (docs/log)
PACKAGES = {"english": "pip install ./models/english"}  # models that are installed by themselves
# Keys of every config.
KEYS = dict(model=dict, vocabulary=int, tokenizer=str, longest=int, parameters=int, sampling=dict, recipe=dict)
COUNTS = ("texts", "held_out", "held_out_seen", "left_out", "repeated", "rows", "source_vocabulary")
OPTIONAL = {
    **dict.fromkeys(("format", *COUNTS), int),
    **dict.fromkeys(("method", "command", "teacher", "language", *OF_WEIGHTS), str),
    **dict.fromkeys(("trained", "gaps", "adapter"), dict),
    **dict(base=object, labels=list, whole_texts_held_out=bool, guidance=float),
}


def bundled_runs() -> dict[str, Path]:
    """Models that come with the package, and those that packages of their own bring, by name."""
    folder = Path(str(resources.files("difflm") / "pretrained"))
    return {**installed_runs(), **{path.parent.name: path.parent for path in sorted(folder.glob("*/config.json"))}}


@cache
def installed_runs() -> dict[str, Path]:
    """Models of packages that are installed beside this one, by the names of their entry points; no code of theirs
    runs."""
    specs = {point.name: find_spec(point.value) for point in entry_points(group="difflm.models")}
    return {name: Path(spec.origin).parent / name for name, spec in specs.items() if spec is not None and spec.origin}


def find_start(language: str) -> str | None:
    """The smallest bundled model that training on texts in a language ("en") can start from."""
    configs = ((name, read_checked(folder / "config.json")) for name, folder in bundled_runs().items())
    able = {name: int(config["parameters"]) for name, config in configs if config.get("language") == language}
    return min(able, key=able.__getitem__, default=None)


def find_run(name_or_path: str | Path) -> Path:
    """Find the directory of a bundled model or of a run."""
    bundled, name, path = bundled_runs(), str(name_or_path), Path(name_or_path)
    if name in bundled:
        return bundled[name]
    if os.path.isfile(path / "config.json"):  # unlike pathlib, it accepts names of any length
        return path
    if len(name.split()) > 1 and not os.path.exists(path):
        raise UsageError(
            f"{name!r} is not a model. To continue a text, give it with a gap: "
            f"difflm generate MODEL --infill {name + ' ___'!r}"
        )
    if os.path.isfile(path):
        raise UsageError(f"{name} is a file, not a model. To train one on its texts: difflm train {name} --out RUN")
    if name in PACKAGES:
        raise UsageError(f"the model {name} is a package of its own. In a clone of difflm: {PACKAGES[name]}")
    what = "holds no config.json, so it is not a run" if path.exists() else "is neither a bundled model nor a directory"
    hint = suggest(name.lower(), bundled, quoted=False)
    raise UsageError(f"{name} {what}. {hint}Bundled: {', '.join(bundled) or 'none'}; or give the directory of a run.")


def resolve_run(name: str | None) -> str | None:
    """The absolute path of a run, so that it is the same from any directory; bundled ones keep their names."""
    return name if name is None or name in bundled_runs() else str(find_run(name).resolve())


def read_config(run: Path) -> Json:
    config = read_checked(run / "config.json", INSTALL if run in bundled_runs().values() else AGAIN)
    if is_open_config(config):
        raise DifflmError(
            f"{run} is somebody else's model, not a run: difflm generate, score, evaluate, compare and studio take it."
        )
    if not isinstance(config, dict) or config.get("format") not in FORMATS or not isinstance(config.get("method"), str):
        raise DifflmError(f"{run}/config.json was not written by this version of difflm.")
    if config["method"] not in METHODS:
        raise DifflmError(
            f"{run} was trained with the method {config['method']!r}, which this installation does not have. "
            "Install the package that has it, or import the code that registers it (difflm.methods.register)."
        )
    if config["method"] == "classifier":
        raise DifflmError(f"{run} is a classifier, not a model: difflm generate MODEL --guide {run}.")
    if missing := [key for key in KEYS if key not in config]:
        raise DifflmError(f"{run}/config.json lacks {missing[0]!r}: it is not the whole config of a run.")
    kinds: dict[str, type] = KEYS | OPTIONAL
    for key, value in config.items():
        if key not in kinds:
            raise DifflmError(f"{run}/config.json: unknown key {key!r}. {suggest(key, kinds)}".rstrip())
        if not isinstance(value, int | float if kinds[key] is float else kinds[key]):
            raise DifflmError(f"{run}/config.json: {key!r} is not of the type {kinds[key].__name__}.")
    return config


def peek_config(name_or_path: str) -> Json:
    """The config of a run, without torch; {} for somebody else's model and for one on the Hub."""
    folder = None if is_hub_name(name_or_path) else find_run(name_or_path)
    return read_config(folder) if folder and not is_open_config(read_json(folder / "config.json")) else {}


def initial_run(name_or_path: str | Path) -> Json:
    """The keys in which a recipe must agree with the run that it starts from."""
    config = read_config(find_run(name_or_path))
    recipe = {"source_words": "shared", "source_longest": 0, **config["recipe"], "longest": config["longest"]}
    own = ("tokenizer", "vocabulary", "more_than", "source_words", "longest", "source_longest")
    model = {f"model.{key}": value for key, value in config["model"].items()}
    return {"method": config["method"], **model, **{key: recipe[key] for key in own}}


def read_sizes(config: Json, words: Tokenizer) -> TextSpec:
    """The sizes of a config; ValueError if they do not match its tokenizer, before anything is built."""
    source, own = words.for_sources.size, config.get("source_vocabulary", 0)
    sizes = TextSpec(config["vocabulary"], config["longest"], config["recipe"].get("source_longest", 0), own, words)
    for what, size, count in (("", sizes.vocabulary, words.size), ("source_", own or source, source)):
        if size != count:
            raise ValueError(f"{what}vocabulary is {size}, and its tokenizer has {count} ids")
    for what, size in (("", sizes.longest), ("source_", sizes.source_longest)):
        if not 0 <= size <= LONGEST:
            raise ValueError(f"{what}longest is {size}, and texts have at most {LONGEST} tokens")
    return sizes


def check_base(run: Path, config: Json) -> tuple[str, str]:
    """The bundled run whose weights those of a run are added to, and their checksum."""
    match config["base"]:
        case {"run": str(name), "sha256": str(sha256)} if name in bundled_runs():
            return name, sha256
    raise DifflmError(f"{run}/config.json: 'base' does not name a bundled model and its checksum.")


def add_to_base(weights: "Mapping[str, Tensor]", name: str, sha256: str) -> "dict[str, Tensor]":
    """Add weights that were stored as differences to those of a bundled run; what they lack is as in that run."""
    from difflm.runtime.tensors import load_tensors

    path = bundled_runs()[name] / "model.safetensors"
    check_sha256(path, {"sha256": sha256}, INSTALL)
    base = load_tensors(path)
    return base | {
        key: weight if key not in base or base[key].shape != weight.shape else base[key].float() + weight.float()
        for key, weight in weights.items()
    }


def refuse_broken(model: "LanguageModel") -> None:
    """Refuse a process of another package if `back` of a word that no noise has met is no distribution, or not a
    number: its texts would mean nothing."""
    process = cast("DiscreteProcess", model.denoiser.process) if model.capabilities.state == "tokens" else None
    if process is None or type(process).__module__.startswith("difflm."):
        return
    import torch

    ids, t = torch.full((3, 1), process.words // 2), torch.tensor([0.2, 0.5, 0.8])
    found = process.posterior(ids, ids, t, t / 2)
    if not ((found >= 0).all() and (found.sum(-1) - 1).abs().max() < 1e-2):
        name = type(process).__name__
        raise DifflmError(f"{name}.back gives no probabilities: they should be at least 0, and sum to 1.")


def find_base(run: Path, config: Json) -> str:
    """The model that a run's adapters are added to."""
    match config["adapter"]:
        case {"base": str(name), "fingerprint": str()}:
            if name in bundled_runs() or (Path(name) / "config.json").is_file():
                return name
            where = f"{name}, which is not there: difflm generate DIR --adapter {run}"
            raise DifflmError(f"{run} holds adapters of {where}.")
    raise DifflmError(f"{run}/config.json: 'adapter' does not name a base and its fingerprint.")


def start_base(model: "LanguageModel", run: Path, config: Json, tokenizer: Tokenizer) -> None:
    """Give a model the weights of the model that its adapters start from, with these added."""
    from difflm.models.adapters import Adapter

    base, adapter = find_base(run, config), Adapter.read(run)
    adapter.check_base(find_run(base))
    if config["recipe"].get("init"):
        initial, _, _ = load_run(base)
        model.load_state_dict({**model.state_dict(), **initial.state_dict()})
    else:
        method = METHODS[config["method"]](**{**config["model"], "pretrained": base})
        method.start(model, tokenizer)
    adapter.add_to(model)


def load_run(name_or_path: str | Path, device: "str | torch.device" = "cpu") -> "tuple[LanguageModel, Tokenizer, Json]":
    """Load the model, tokenizer and config of a run; files that do not belong together are refused."""
    run = find_run(name_or_path)
    config = read_config(run)

    from difflm.runtime.tensors import BESIDE, SkipInit, load_into, load_tensors
    from difflm.runtime.threads import check_process
    from difflm.training.checkpoints import advise_resume

    check_process()
    tokenizer = Tokenizer.load(run / "tokenizer.json")
    if tokenizer.fingerprint() != config["tokenizer"]:
        raise DifflmError(f"{run}/tokenizer.json is not the tokenizer this model was trained with.")
    if METHODS[config["method"]].kind == "adapter":
        raise DifflmError(f"{run} holds adapters of {find_base(run, config)}: difflm generate and studio take it.")
    adapted = "adapter" in config
    path, advice = run / ("adapter_model.safetensors" if adapted else "model.safetensors"), advise_resume(run)
    weights = load_tensors(path, advice)
    if "base" in config:
        weights = add_to_base(weights, *check_base(run, config))
    part = "model"
    try:
        sizes = read_sizes(config, tokenizer)
        method = METHODS[config["method"]](**config["model"])
        if fault := method.find_fault():
            raise ValueError(fault)
        # A Hugging Face network is built with all its own tokens before they are replaced.
        borrowed = any(isinstance(value, dict) and value for value in config["model"].values())
        with SkipInit(None if adapted else weights, 1 << 28 if borrowed else BESIDE):
            model = method.build(sizes)
        part = "sampling"
        model.sampling = Sampling(**config["sampling"])
    except NOT_A_MODEL as error:
        wrong = first_line(error)
        if isinstance(error, ValidationError):
            wrong = f"{part}.{'.'.join(str(one) for one in error.errors()[0]['loc'])}"
        raise DifflmError(f"{run}/config.json does not describe a {config['method']} model ({wrong}).") from None
    # Then one text makes products large enough. With bfloat16 units, loading weights takes longer: a batch shares it.
    large = sum(p.numel() for p in model.parameters()) >= ONE_BY_ONE
    one_by_one = model.capabilities.whole_canvas and large and not is_on("matrix_units")
    model.capabilities = replace(model.capabilities, one_by_one=one_by_one)
    if adapted:
        start_base(model, run, config, tokenizer)
    else:
        load_into(model, weights, path, fresh=True)
    check_sha256(path, config, advice)
    refuse_broken(model)
    return model.to(device).eval(), tokenizer, config
