"""Write the page that runs a model in the browser: `python -m browser.export english-small demo`.

The directory holds the page, its scripts, the kernels, and a model whose matrices have eight bits per weight.

WebAssembly of our own instead of a runtime for exported graphs: eight kilobytes of kernels do what these networks need,
and the loop, the noise and the words have to be written for the browser in any case.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from benchmarks.assets.quantise import quantise_rows
from difflm.app.commands.options import check_names, report_errors
from difflm.app.console import note
from difflm.app.studio.served import EXAMPLES
from difflm.data.corpora import describe_training
from difflm.data.tokenizers import Bpe, Characters, Words
from difflm.diffusion.codecs import Tokens
from difflm.diffusion.codecs.embedding import Embedding, LearnedEmbedding
from difflm.diffusion.denoiser import Conditioning
from difflm.diffusion.processes import Absorbing
from difflm.diffusion.processes.gaussian import Cosine, Gaussian, LogSnrShift
from difflm.diffusion.processes.interpolating import LinearAlpha
from difflm.diffusion.timesteps import LearnedWarp, LowDiscrepancy
from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.models.base import LanguageModel
from difflm.models.diffusion import DiffusionModel
from difflm.models.lengths import DrawnLength
from difflm.models.sampling import SETTINGS, Sampling
from difflm.networks import Transformer
from difflm.player.page import HERE as PLAYER
from difflm.player.page import read_page
from difflm.runtime.files import explain_write_errors
from difflm.runtime.tensors import save_tensors

HERE = Path(__file__).parent
OWN = (".css", ".js", ".wasm")  # files of this folder
SHARED = ("look.css", "player.js", "parts.js", "time.js", "icon.svg")  # with the player
SAMPLERS = {"vectors": ("ancestral", "ddim"), "masks": ("ancestral", "first-hitting", "confidence")}
WIDEST = 16384  # inputs of a layer (kernels.c)


def write_page(lm: TextDiffusion, name: str, folder: Path) -> int:
    """Write the page of a model into a new directory, completely or not at all; return its size in bytes."""
    config, tensors = describe_model(lm, name), pack_weights(lm)
    with explain_write_errors(folder, "FOLDER"):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} already exists and is not empty: remove it, or choose another directory.")
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            save_tensors(made / "model.safetensors", tensors)
            size = (made / "model.safetensors").stat().st_size
            told = json.dumps({**config, "bytes": size}, ensure_ascii=False, separators=(",", ":"))
            (made / "model.json").write_text(told, encoding="utf-8")
            (made / "index.html").write_text(read_page(HERE / "index.html"), encoding="utf-8")
            own = [path for path in HERE.iterdir() if path.suffix in OWN]
            for path in [*own, *(PLAYER / one for one in SHARED)]:
                shutil.copyfile(path, made / path.name)
            made.chmod(0o755)
            if folder.exists():
                folder.rmdir()
            made.replace(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return sum(path.stat().st_size for path in folder.iterdir())


def describe_model(lm: TextDiffusion, name: str) -> dict[str, Any]:
    """Return the settings for the page's scripts; rejects a model that they cannot run."""
    model, tokenizer = lm.model, lm.tokenizer
    state = find_state(model)
    if not state:
        kinds = "masks (mdlm) or of word vectors (difflm), without sources"
        raise UsageError(f"the page can run models of {kinds}; {name} is another ({lm.config['method']}).")
    if not isinstance(tokenizer, Words | Bpe | Characters):
        raise UsageError(f"the page cannot run the tokenizer of {name}, which is not one of difflm's own.")
    sampling, network, codec = model.sampling, model.denoiser.network, model.denoiser.codec
    assert isinstance(network, Transformer) and isinstance(model.lengths, DrawnLength)
    if sampling.sampler not in SAMPLERS[state]:
        known = " or ".join(SAMPLERS[state])
        raise UsageError(f"the page samples such models with {known}, not with {sampling.sampler}, as {name} does.")
    plain = Sampling(sampling.sampler, sampling.steps, sampling.temperature or 1.0, sampling.noise_temperature)
    if other := [key for key in SETTINGS if getattr(plain, key) != getattr(sampling, key)]:
        raise UsageError(f"the page does not support the setting {other[0]} of {name}.")
    if wrong := [one for one in network.modules() if isinstance(one, nn.Linear) and not fits(one)]:
        raise UsageError(f"the page needs layers of 4, 8, 12 … inputs; one of {name} has {wrong[0].in_features}.")
    return {
        "name": Path(name).name,
        "method": lm.config["method"],
        "parameters": lm.config["parameters"],
        "learned": describe_training(lm.config),
        "example": find_example(lm, name),
        "tokenizer": tokenizer.to_json(),
        "state": state,
        "vocabulary": codec.vocabulary,
        "longest": model.max_words,
        "lengths": model.lengths.counts.tolist(),
        "hidden": network.input.out_features,
        "layers": len(network.blocks),
        "heads": network.input.out_features // network.head_dim,
        "timed": network.time == "adaptive",
        "dim": codec.dim if isinstance(codec, Embedding) else 0,
        "forbidden": list(model.lengths.forbidden),
        "learned_gaps": model.capabilities.learned_gaps and not isinstance(tokenizer, Words),
        "gaps": describe_gaps(lm, state),
        "sampler": sampling.sampler,
        "steps": sampling.steps,
        "temperature": sampling.temperature,
        "noise_temperature": sampling.noise_temperature,
        **describe_noise(model),
    }


def fits(layer: nn.Linear) -> bool:
    return layer.in_features % 4 == 0 and layer.in_features <= WIDEST


def find_state(model: Any) -> str:
    """The kind of noise, "vectors" or "masks"; "" if the page cannot run the model's parts."""
    if type(model) is not DiffusionModel or type(model.lengths) is not DrawnLength:
        return ""
    denoiser, process, times = model.denoiser, model.process, model.times
    network, codec, conditioned = denoiser.network, denoiser.codec, type(denoiser.conditioning) is not Conditioning
    if type(network) is not Transformer or network.causal or conditioned:
        return ""
    if type(codec) is Tokens and type(process) is Absorbing and type(process.keep) is LinearAlpha:
        plain = network.time == "none" and denoiser.self_conditioning is None and type(times) is LowDiscrepancy
        return "masks" if plain else ""
    if type(codec) is not LearnedEmbedding or type(process) is not Gaussian or process.exploding:
        return ""
    schedule = process.schedule
    known = isinstance(schedule, LogSnrShift) and isinstance(schedule.base, Cosine)
    words = codec.predicts_tokens and not codec.x0_std and denoiser.self_conditioning is not None
    timed = network.time == "adaptive" and type(times) in (LearnedWarp, LowDiscrepancy)
    return "vectors" if known and words and timed else ""


def describe_gaps(lm: TextDiffusion, state: str) -> dict[str, Any]:
    """The settings with which a masked model fills gaps, if they differ from those for whole texts."""
    gaps: dict[str, Any] = lm.config.get("gaps", {})
    if gaps and (state != "masks" or not gaps.keys() <= {"sampler", "temperature"}):
        raise UsageError(f"the page does not support the settings with which {lm.name} fills gaps: {', '.join(gaps)}.")
    return gaps


def find_example(lm: TextDiffusion, name: str) -> str:
    """The first sentence with gaps among the examples for a bundled model, or for others of English."""
    requests = EXAMPLES.get("english" if lm.config.get("language") == "en" else name, {}).values()
    return next((request["infill"] for request in requests if "infill" in request), "")


def describe_noise(model: LanguageModel) -> dict[str, Any]:
    """The noise curve and the times of a grid, for models of vectors."""
    process, times, codec = model.denoiser.process, model.times, model.denoiser.codec
    if not isinstance(process, Gaussian) or not isinstance(codec, Embedding):
        return {}
    schedule, warp = process.schedule, ([0.0, 1.0], [0.0, 1.0])
    assert isinstance(schedule, LogSnrShift) and isinstance(schedule.base, Cosine)
    if isinstance(times, LearnedWarp):
        along_time, along_loss = (edges.detach() for edges in times.edges())
        warp = (along_loss / along_loss[-1]).tolist(), (along_time / along_time[-1]).tolist()
    shown = codec.adds_evidence
    return {"evidence": shown, "schedule": {"s": schedule.base.s, "shift": schedule.shift}, "warp": warp}


def pack_weights(lm: TextDiffusion) -> dict[str, Tensor]:
    """The denoiser's tensors under their own names: 8-bit matrices with one scale per row, word vectors as they
    diffuse."""
    codec = lm.model.denoiser.codec
    own = {name: tensor.detach().float().cpu() for name, tensor in lm.model.state_dict().items()}
    own = {name: tensor for name, tensor in own.items() if name.startswith(("denoiser.network.", "denoiser.codec."))}
    vectors = {"denoiser.codec.raw": codec.table().detach().float().cpu()} if isinstance(codec, Embedding) else {}
    return {**quantise_rows({name: one for name, one in own.items() if name not in vectors}), **vectors}


@report_errors
def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("browser.export", description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="a bundled model, or the directory of a run")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a new directory, for any static web server")
    asked = parser.parse_args(argv)
    check_names("cpu", asked.model)
    size = write_page(TextDiffusion.from_pretrained(asked.model), asked.model, asked.folder)
    note(f"{asked.folder}: {size / 2**20:.1f} MiB. To see it: python -m http.server -d {asked.folder}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
