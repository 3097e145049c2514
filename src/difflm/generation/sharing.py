"""Where models come from and where they go: bundled ones, directories, and the Hugging Face Hub."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Self

import torch

from difflm.data.chat import Chat
from difflm.errors import UsageError
from difflm.fast.inference import Inference
from difflm.generation.checks import check_device, check_dtype, check_eight_bits, check_sampling, fastest_dtype
from difflm.generation.reading import Reader
from difflm.models.open_models import find_open_model, load_open_model
from difflm.runtime.files import OF_WEIGHTS, Json, explain_write_errors, write_checked
from difflm.runtime.hub import fetch_from_hub, is_hub_name, push_to_hub
from difflm.training.checkpoints import save_weights
from difflm.training.model_card import write_card
from difflm.training.run import KEYS, check_base, find_run, load_run

BESIDE = ("metrics.jsonl", "tags.json")  # files of a run that are not needed to load its weights
GUIDE_FILES = ("*.json", "*.safetensors")


class Pretrained(Reader):
    """A model that is loaded by name, saved as a directory, and pushed to the Hub."""

    folder: Path | None = None  # of the run that it was loaded from
    chat: Chat | None = None  # for chat models
    fixed_dtype = False  # whether the dtype was chosen by the caller
    guides: list[Path]  # directories of classifiers; loaded when a control asks for one

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        device: str = "cpu",
        dtype: torch.dtype | str | None = None,
        compile: bool = False,
        revision: str | None = None,
    ) -> Self:
        """Load a bundled model such as "e2e", the directory of a run or of an open model, or a model on the
        Hugging Face Hub, where `revision` is a branch, tag or commit. `device` is "cpu", "cuda", or the better of both
        ("auto").

        `dtype` is the number format of the network; weights and everything outside the network stay in float32. None
        means the fastest for generating, and float32 for scores. `compile` fuses the sampling steps of models of word
        vectors: it takes minutes at first and a little at every new size, which pays off for a server."""
        if not isinstance(name_or_path, str | Path):
            raise UsageError(f"name a model, such as 'e2e', or the directory of a run, not {name_or_path!r}.")
        chosen, name = check_device(device), Path(name_or_path).resolve().name
        dtype = check_dtype(dtype, chosen)
        if is_hub_name(name_or_path):
            name_or_path = fetch_from_hub(str(name_or_path), revision)
        elif revision is not None:
            raise UsageError(f"a revision is for models on the Hub; {name_or_path} is on this machine.")
        if (folder := find_open_model(name_or_path)) is not None:
            found = load_open_model(folder, chosen, dtype or fastest_dtype(chosen) or torch.float32)
            made = cls(found.model, found.tokenizer, found.config, Inference(found.model, None, compile))
            made.name, made.chat = name, found.chat
            return made
        model, tokenizer, config = load_run(name_or_path, chosen)
        eight = dtype is torch.int8
        if eight:
            check_eight_bits(model)
        model.set_compute_dtype(None if eight or dtype is torch.float32 else dtype)
        inference = Inference(model, fastest_dtype(chosen) if dtype is None else dtype if eight else None, compile)
        made = cls(model, tokenizer, config, inference)
        made.name, made.folder, made.fixed_dtype = name, find_run(name_or_path), dtype is not None
        made.guides = find_guides(made.folder, config)
        check_sampling(model.sampling, model)
        return made

    def save_pretrained(self, folder: str | Path) -> Path:
        """Save the model as a run that `from_pretrained` can load, with its classifiers and its model card. The new
        directory appears when it is complete."""
        target = Path(folder)
        if missing := [key for key in KEYS if key not in self.config]:
            raise UsageError(
                f"{self.name} cannot be saved as a run: its config lacks {missing[0]!r}. "
                "To keep somebody else's model, copy its directory."
            )
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{target} already exists. Choose another directory.")
        with explain_write_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as beside:
                run = Path(beside) / target.resolve().name
                self._write_run(run)
                if target.exists():
                    target.rmdir()
                os.replace(run, target)
        return target

    def push_to_hub(
        self, repo: str, revision: str | None = None, token: str | None = None, private: bool = False
    ) -> str:
        """Push the model to OWNER/NAME on the Hugging Face Hub as one commit, to a branch if `revision` names one, and
        return the URL. The default `token` is that of `hf auth login` or $HF_TOKEN. `private` applies if the repository
        is created; an existing one keeps its visibility."""
        with tempfile.TemporaryDirectory() as beside:
            folder = self.save_pretrained(Path(beside) / repo.rpartition("/")[2])
            return push_to_hub(folder, repo, revision, token, private)

    def _write_run(self, run: Path) -> None:
        run.mkdir()
        left_out = (*OF_WEIGHTS, "base")  # keys that describe the file of weights
        write_checked(run / "config.json", {key: value for key, value in self.config.items() if key not in left_out})
        self.tokenizer.save(run / "tokenizer.json")
        save_weights(run, self.model.state_dict())
        for name in BESIDE:
            if self.folder is not None and (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, run / name)
        for guide in self.guides:
            own = run / (guide.name if guide.name.startswith("guide") else f"guide-{guide.name}")
            own.mkdir()
            for path in (path for pattern in GUIDE_FILES for path in guide.glob(pattern)):
                shutil.copyfile(path, own / path.name)
        write_card(run)


def find_guides(run: Path, config: Json) -> list[Path]:
    """The directories of a run's classifiers; a run without any has those of the run that its weights are added to,
    since both have the same word vectors."""
    found = sorted(run.glob("guide*/"))
    return found if found or "base" not in config else sorted(find_run(check_base(run, config)[0]).glob("guide*/"))
