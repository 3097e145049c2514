"""Where models come from and where they go; what they say of given texts: their ids, their likelihood, and that of each
of their words."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, overload

import torch
from torch.nn import functional as F

from difflm.controls.gaps import BLANK
from difflm.data.batches import Batch
from difflm.data.chat import Chat
from difflm.data.meaning import Lexicon, is_other_language
from difflm.data.tokenizers import SPECIALS, Tokenizer
from difflm.diffusion.condition import UNCONDITIONAL
from difflm.diffusion.denoiser import NO_SOURCE
from difflm.diffusion.noise import Noise
from difflm.errors import UsageError, is_unicode
from difflm.fast.inference import Inference
from difflm.generation.checks import check_device, check_dtype, check_eight_bits, check_sampling, fastest_dtype
from difflm.generation.texts import Repaired, TokenBelief
from difflm.methods import METHODS
from difflm.models.adapters import Adapter
from difflm.models.base import LanguageModel
from difflm.models.batching import pad_token_rows, source_condition
from difflm.models.open_models import find_open_model, load_open_model
from difflm.models.word_nats import NEARLY_WRITTEN, leave_one_out_log_probs, masked_logits, nats_in_order
from difflm.runtime.files import OF_WEIGHTS, Json, explain_write_errors, write_checked
from difflm.runtime.hub import fetch_from_hub, is_hub_name, push_to_hub
from difflm.runtime.threads import check_process
from difflm.training.checkpoints import save_weights
from difflm.training.model_card import write_card
from difflm.training.run import KEYS, check_base, find_base, find_run, load_run, peek_config

MOST_FOREIGN = 0.5  # share of letters that no token spells, above which a text is in another script
FEWEST = 12  # tokens by which a text is found unusual
SHOWN = 40  # characters of a text in a warning
LEXICON = "words.txt"
BESIDE = ("metrics.jsonl", "tags.json", LEXICON)  # files of a run that are not needed to load its weights
GUIDE_FILES = ("*.json", "*.safetensors")
REPAIRED_LOGITS = 2**25  # at a time: a captured reading keeps several tensors of this size


def list_texts(given: Any, what: str) -> list[str]:
    """Return one text or several as a list; anything else is rejected, with `what` as the argument's name."""
    found = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if wrong := [one for one in found if not isinstance(one, str)]:
        raise UsageError(f"{what} must be a text or a list of texts, not {wrong[0]!r}.")
    if not found:
        raise UsageError(f"there is no {what}: give a text or a list of texts.")
    if odd := [one for one in found if not is_unicode(one)]:
        raise UsageError(f"{what} {odd[0][:40]!r} contains half of a surrogate pair, which is not Unicode.")
    return found


def check_rows(rows: list[list[int]], room: int, name: Callable[[int], str]) -> list[list[int]]:
    """Return texts given as ids; one that is empty, or has more tokens than there is room for, is rejected by name."""
    for number, row in enumerate(rows, start=1):
        if not row:
            raise UsageError(f"{name(number)} is empty.")
        if len(row) > room:
            raise UsageError(
                f"{name(number)} has {len(row)} tokens; this model reads at most {room}. Shorten or split it."
            )
    return rows


class Reader:
    """A model with its tokenizer, which reads texts. `TextDiffusion` also writes them. It is loaded by name, saved as a
    directory, and pushed to the Hub."""

    folder: Path | None = None  # of the run that it was loaded from
    chat: Chat | None = None  # for chat models
    fixed_dtype = False  # whether the dtype was chosen by the caller
    costs: Mapping[tuple[int, ...], float] = {}  # of candidates that were read ahead, by their ids
    guides: list[Path]  # directories of classifiers; loaded when a control asks for one

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, config: Json, inference: Inference | None = None
    ) -> None:
        self.model, self.tokenizer, self.config, self.name = model, tokenizer, config, "this model"
        # Settings for gaps, `candidates`, the phrase behind which it `restates` a text, and the nats a token that usual
        # texts have at most.
        self.gaps: Json = config.get("gaps", {})
        if model.capabilities.reads_in_order and "restates" in self.gaps:  # what it says in other words alone
            _, first, second, *_ = tokenizer.encode(f". {self.gaps['restates']}")
            model.capabilities = replace(model.capabilities, unsaid=(first, second))
        if tokenizer.fragments and not model.lengths.pieces:
            model.forbid_tokens(tokenizer.fragments)
        self.inference = inference or Inference(model)

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        return self.inference.device

    @cached_property
    def pieces(self) -> list[str]:
        """The text of each token; a special token is empty."""
        return [*self.model.lengths.pieces] or ["".join(self.tokenizer.tokens([k])) for k in range(self.tokenizer.size)]

    @cached_property
    def lexicon(self) -> Lexicon:
        """The spellings of its training texts; empty if its run does not keep them."""
        path = None if self.folder is None else self.folder / LEXICON
        return Lexicon.load(path) if path and path.is_file() else Lexicon()

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        device: str = "cpu",
        dtype: torch.dtype | str | None = None,
        compile: bool = False,
        revision: str | None = None,
        adapter: str | Path | Sequence[str | Path] = (),
    ) -> Self:
        """Load a bundled model such as "e2e", the directory of a run or of an open model, or a model on the
        Hugging Face Hub, where `revision` is a branch, tag or commit. `device` is "cpu", "cuda", or the better of both
        ("auto").

        `dtype` is the number format of the network; weights and everything outside the network stay in float32. None
        means the fastest for generating, and float32 for scores. `compile` fuses the sampling steps of models of word
        vectors: it takes minutes at first and a little at every new size, which pays off for a server.

        `adapter` names directories of LoRA adapters, of difflm or of peft, which are added to the weights one after the
        other."""
        if not isinstance(name_or_path, str | Path):
            raise UsageError(f"name a model, such as 'e2e', or the directory of a run, not {name_or_path!r}.")
        chosen, name = check_device(device), Path(name_or_path).resolve().name
        dtype = check_dtype(dtype, chosen)
        if is_hub_name(name_or_path):
            name_or_path = fetch_from_hub(str(name_or_path), revision)
        elif revision is not None:
            raise UsageError(f"a revision is for models on the Hub; {name_or_path} is on this machine.")
        added = [Path(adapter)] if isinstance(adapter, str | Path) else [*map(Path, adapter)]
        config = peek_config(str(name_or_path))
        if "adapter" in config and METHODS[config["method"]].kind == "adapter":  # of somebody else's model
            added, name_or_path = (
                [Path(name_or_path), *added],
                find_base(find_run(name_or_path), config) or name_or_path,
            )
        adapters = [Adapter.read(path) for path in added]
        for one in adapters:
            one.check_base(find_run(name_or_path))
        if (folder := find_open_model(name_or_path)) is not None:
            found = load_open_model(folder, chosen, dtype or fastest_dtype(chosen) or torch.float32)
            for one in adapters:
                one.add_to(found.model)
                found.model.set_longest(one.run.get("longest", found.model.longest - 1))
            made = cls(found.model, found.tokenizer, found.config, Inference(found.model, None, compile))
            made.chat = found.chat
        else:
            made = cls._load_run(find_run(name_or_path), chosen, dtype, compile, adapters)
        made.name = name
        return made

    @classmethod
    def _load_run(
        cls, run: Path, device: torch.device, dtype: torch.dtype | None, compile: bool, adapters: Sequence[Adapter]
    ) -> Self:
        """Load a run, with its classifiers."""
        model, tokenizer, config = load_run(run, device)
        for one in adapters:
            one.add_to(model)
        if eight := dtype is torch.int8:
            check_eight_bits(model)
        model.set_compute_dtype(None if eight or dtype is torch.float32 else dtype)
        inference = Inference(model, fastest_dtype(device) if dtype is None else dtype if eight else None, compile)
        made = cls(model, tokenizer, config, inference)
        made.folder, made.fixed_dtype, made.guides = run, dtype is not None, sorted(run.glob("guide*/"))
        if not made.guides and "base" in config:  # of the run that its weights are added to: word vectors are the same
            made.guides = sorted(find_run(check_base(run, config)[0]).glob("guide*/"))
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
                run.mkdir()
                left_out = (*OF_WEIGHTS, "base")  # keys that describe the file of weights
                about = {key: value for key, value in self.config.items() if key not in left_out}
                write_checked(run / "config.json", about)
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

    def source_room(self) -> int:
        """The largest number of tokens of a source; raises an error for a model without sources."""
        if not self.model.capabilities.source_limit:
            raise UsageError(f"{self.name} was trained on texts without sources and cannot write from one.")
        return self.model.capabilities.source_limit

    def encode_sources(
        self, source: str | Sequence[str] | None, name: Callable[[int], str] = "source {}".format
    ) -> list[list[int]]:
        """Return the token ids of sources; rejects a source that the model cannot read, by its number or its `name`."""
        if source is None:
            raise UsageError(f"{self.name} writes each text from a source: give one (--source, difflm translate).")
        room = self.source_room()
        return check_rows(self.tokenizer.for_sources.encode_batch(list_texts(source, "source")), room, name)

    def check_sources(self, rows: list[list[int]]) -> list[list[int]]:
        """Return the token ids of sources; rejects what this model cannot read, like `encode_sources`."""
        return check_rows(rows, self.source_room(), "source {}".format)

    def warn_of_language(self, text: str, source: bool = False) -> list[str]:
        """Warn of a text, or of a source, in letters or a language that this model was not trained on."""
        tokenizer = self.tokenizer.for_sources if source else self.tokenizer
        english = self.config.get("language") == "en" and not source
        shown = repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}…")
        if tokenizer.foreign_share(text) > MOST_FOREIGN:
            why = f"texts that hardly have the letters of {shown}"
        elif english and is_other_language(text):
            why = f"English texts; {shown} looks like another language"
        elif not source and "usual_nats" in self.gaps and self.given_nats(text) > self.gaps["usual_nats"]:
            why = f"other texts: {shown} is further from them than 99 % of them"
        else:
            return []
        return [f"{self.name} was trained on {why}. For such texts, train a model on some: difflm train FILE"]

    @torch.no_grad()
    def given_nats(self, text: str) -> float:
        """The nats a token of a text without its gaps, read from left to right; 0 if it is too short to tell."""
        rows = [row[: self.model.max_words] for row in self.tokenizer.encode_batch(BLANK.split(text)[::2]) if row]
        count = sum(len(row) - 1 for row in rows)
        if count < FEWEST or not self.model.capabilities.reads_in_order:
            return 0.0
        ids, mask = self.model.lengths.canvas(*(part.to(self.device) for part in pad_token_rows(rows)))
        return float(nats_in_order(self.inference.denoiser, ids, mask).sum()) / count

    def encode(self, texts: str | Sequence[str]) -> list[list[int]]:
        """Return the word ids of texts; rejects a text that is too long for the model, by its number."""
        rows = self.tokenizer.encode_batch(list_texts(texts, "text") if texts or texts == "" else [])
        return check_rows(rows, self.model.max_words, "text {}".format)

    @torch.no_grad()
    def score(
        self,
        texts: str | Sequence[str],
        seed: int = 0,
        draws: int = 16,
        batch_size: int = 64,
        source: str | Sequence[str] | None = None,
    ) -> list[float]:
        """Return −log p of each text, or its bound, in nats. Models trained on pairs need the source of each text, or
        one source for all."""
        rows, sources = self.encode(texts), []
        if source is not None or self.model.capabilities.source_limit:
            sources = self.encode_sources(source) * (len(rows) if isinstance(source, str) else 1)
        return [float(v) for v in self.score_ids(rows, seed, draws, batch_size, sources=sources)]

    def score_ids(self, rows: list[list[int]], *settings: Any, **more: Any) -> torch.Tensor:
        """Return the nats of texts given as ids; further arguments as for `score_ids_with_errors`."""
        return self.score_ids_with_errors(rows, *settings, **more)[0]

    @torch.no_grad()
    def score_ids_with_errors(
        self,
        rows: list[list[int]],
        seed: int = 0,
        draws: int = 16,
        batch_size: int = 64,
        numbers: Sequence[int] | None = None,
        sources: Sequence[Sequence[int]] = (),
        each: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return nats and their standard errors over a bound's draws, in batches of similar length; the result does not
        depend on the batch size.

        `numbers` are those of the texts, 0, 1 … where none are given: texts of one number share their noise, so that
        candidates for one gap or source differ by what they say alone. `sources` are what they are
        written from: each is the source of `each` texts in a row."""
        samples = torch.arange(len(rows)) if numbers is None else torch.tensor(numbers)

        def read(batch: Batch, chosen: list[int]) -> torch.Tensor:
            noise = Noise(seed, samples[chosen].to(self.device, non_blocking=True))
            return torch.stack([part.float() for part in self.inference.nats_and_error(batch, noise, draws)])

        nats, errors = self._read_rows(rows, read, batch_size, sources, each)
        return nats, errors

    @torch.no_grad()
    def repair_ids(
        self,
        rows: list[list[int]],
        repairs: int,
        doubt: float,
        batch_size: int = 64,
        sources: Sequence[Sequence[int]] = (),
        each: int = 1,
        writer: "Reader | None" = None,
    ) -> list[Repaired]:
        """Return what a left-to-right model makes of texts given as ids, each repaired as often as given: its
        likeliest version; `doubt` as in `Repairs`, `sources` as above. A `writer` that can expect words
        (`expects_words`) has a say in which words are likely, and is called once for each text."""
        room = self.model.max_words
        if not rows:
            return []
        batch_size = min(batch_size, max(1, REPAIRED_LOGITS // (room * self.model.vocabulary)))

        def read(batch: Batch, _: object) -> torch.Tensor:
            expect = None if writer is None else writer.inference.expect_words
            found = self.inference.repair_texts(batch, repairs, doubt, expect)
            return F.pad(found, (0, 0, 0, 3 + room - len(found)))

        best, readings, lengths, *_ = found = self._read_rows(rows, read, batch_size, sources, each)
        ids, sizes = found[3:].T.long().tolist(), lengths.long().tolist()
        costs = best.tolist(), (readings.long() + (writer is not None)).tolist()
        return [Repaired(row[:size], *cost) for row, size, *cost in zip(ids, sizes, *costs, strict=True)]

    @property
    def expects_words(self) -> bool:
        """Whether the model can say how likely each word is at each place of a text before any is written."""
        return self.reads_tokens and "masked" in self.model.capabilities.settings

    def _read_rows(
        self,
        rows: list[list[int]],
        read: Callable[[Batch, list[int]], torch.Tensor],
        batch_size: int,
        sources: Sequence[Sequence[int]],
        each: int,
    ) -> torch.Tensor:
        """The columns that `read` returns for batches of similar length and their indices, on the host."""
        check_process()
        if sources:
            self.source_room()
            if len(sources) * each != len(rows):
                raise UsageError(f"{len(rows):,} texts have {len(sources):,} sources: give each its own.")
        elif self.model.capabilities.source_limit:
            raise UsageError(NO_SOURCE)
        found: list[torch.Tensor] = []
        order = [*range(len(rows))]
        if len(rows) > batch_size or each == 1 or not self.inference.shares_sources:
            sources, each = [source for source in sources for _ in range(each)], 1
            order.sort(key=lambda i: len(rows[i]))
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            padded = pad_token_rows([rows[i] for i in chosen])
            told = pad_token_rows([sources[i] for i in chosen[: len(chosen) // each]]) if sources else ()
            batch = Batch(*(part.to(self.device, non_blocking=True) for part in (*padded, *told)))
            found.append(read(batch, chosen).cpu())
        whole = torch.cat(found, 1) if found else torch.zeros(2, 0)  # nats and errors of no text
        return whole[:, torch.tensor(order).argsort()]

    @overload
    def alternatives(self, texts: str, source: str | Sequence[str] | None = None, k: int = 5) -> list[TokenBelief]: ...
    @overload
    def alternatives(
        self, texts: list[str] | tuple[str, ...], source: str | Sequence[str] | None = None, k: int = 5
    ) -> list[list[TokenBelief]]: ...
    def alternatives(
        self, texts: str | Sequence[str], source: str | Sequence[str] | None = None, k: int = 5
    ) -> list[TokenBelief] | list[list[TokenBelief]]:
        """Return, for each token of a text, its probability given all other tokens, and the `k` likeliest tokens in its
        place. A list of texts gives one list for each. Models trained on pairs need the source of each text, or one
        source for all."""
        rows, sources = self.encode(texts), []
        if source is not None or self.model.capabilities.source_limit:
            sources = self.encode_sources(source) * (len(rows) if isinstance(source, str) else 1)
        found = [self.read_tokens(row, sources[n] if sources else (), k) for n, row in enumerate(rows)]
        return found[0] if isinstance(texts, str) else found

    @property
    def reads_tokens(self) -> bool:
        """Whether the model can say how likely a token is, given all others of its text at once. One that follows its
        teacher's paths cannot: on these the noise alone tells the text."""
        able = self.model.capabilities
        return able.position_beliefs and able.whole_canvas and not able.coupled

    def check_reads_tokens(self) -> LanguageModel:
        """Return the model if it sees all other tokens of a text at once, and refuse it otherwise."""
        model = self.model
        if model.capabilities.coupled:
            raise UsageError(f"{self.name} was trained to write in few steps, and cannot tell how likely words are.")
        if not self.reads_tokens:
            raise UsageError(
                f"{self.name} ({self.config['method']}) does not see all other words of a text at once. "
                "Ask a diffusion model of whole texts, or use lm.score for how likely a whole text is."
            )
        return model

    @torch.no_grad()
    def token_logits(
        self, ids: Sequence[int], source: Sequence[int] = (), begin: int = 0, end: int = 0
    ) -> torch.Tensor:
        """Logits of each token from `begin` to `end` (0: the last) of one text, given all its other tokens, [L, V]."""
        check_process()
        model, end = self.check_reads_tokens(), end or len(ids)
        denoiser, condition = model.denoiser, source_condition([source]) if source else UNCONDITIONAL
        condition = denoiser.prepare(condition.to(self.device))
        canvas, mask = model.lengths.canvas(*(part.to(self.device) for part in pad_token_rows([list(ids)])))
        places = slice(model.lengths.first + begin, model.lengths.first + end)
        if denoiser.process.mask_id >= 0:
            return masked_logits(denoiser, canvas, mask, condition, places).float()
        t = model.times.time_of(torch.full((1,), NEARLY_WRITTEN, device=self.device))
        return leave_one_out_log_probs(denoiser, t, canvas, mask, condition)[0, places].float()

    def read_tokens(self, ids: Sequence[int], source: Sequence[int] = (), k: int = 5) -> list[TokenBelief]:
        """Return the model's beliefs about each token of one text, given its ids."""
        shares = self.token_logits(ids, source).softmax(-1).cpu()
        best = shares.topk(min(k + len(SPECIALS), shares.shape[-1]), dim=-1)
        found = []
        for token, own, likely, chances in zip(ids, shares, best.indices.tolist(), best.values.tolist(), strict=True):
            named = [(piece, p) for i, p in zip(likely, chances, strict=True) if (piece := self.pieces[i])]
            found.append(TokenBelief(self.pieces[token], float(own[token]), dict(named[:k])))
        return found
