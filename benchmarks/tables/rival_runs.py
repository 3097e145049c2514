"""What `benchmarks.tables.rivals` trains and on what: labels of E2E, targets, sentences of ROCStories, and the runs."""

import gzip
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from shutil import copytree
from typing import TYPE_CHECKING, Any

from benchmarks.tables.timed import UNTIMED, train_for_minutes

if TYPE_CHECKING:
    from difflm.annotators.trees import Tree
    from difflm.data.corpora import E2EPair
    from difflm.evaluation.targets import Target
    from difflm.generation.pipeline import TextDiffusion

CHUNK = 500  # texts that a process parses at once
PARTS = ("length", "field", "pos", "tree", "span", "field+pos", "field+tree")  # of E2E
# The best weights on validation, for those who know 42,000 short texts by heart within minutes.
BEST = ["patience=1000000", "validate_every=200"]
SMALL = ["model.hidden=256", "model.layers=5", "model.heads=4", "seed=1"]  # of a judge, who is none of the rivals


@dataclass(frozen=True)
class Trained:
    """A run: its recipe, what is changed in it, and the run whose texts it guides, if it is a classifier."""

    recipe: str
    changes: Sequence[str] = ()
    guides: str = ""


# Words are those of the other runs; pretrained weights want smaller steps than new ones.
PRETRAINED = ["model.pretrained=PRETRAINED", "lr=1e-4", "warmup=100", "ema=0.99", "model.dropout=0.1", "batch_size=128"]
PRETRAINED += ["compile=true"]  # its steps are not captured, so the host would be the limit
PROMPTS = ["data=OUT/prompts.jsonl", "tokenizer=OUT/prompts"]
SENTENCES = ["data=OUT/sentences.jsonl", "column=text", "widths=[]"]
RUNS = {
    "e2e-difflm": Trained("e2e"),
    "e2e-diffusion-lm": Trained("e2e-diffusion-lm", ["ema=0.9995"]),
    "e2e-twin": Trained("e2e-autoregressive", BEST),
    "e2e-fine-tuned": Trained("e2e-fine-tuning", [*PROMPTS, *BEST]),
    "e2e-fine-tuned-smollm2": Trained("e2e-fine-tuning", [*PROMPTS, *BEST, *PRETRAINED]),
    "e2e-mouth": Trained("e2e-mdlm", ["method=bert-mouth"]),
    "guide-e2e-difflm": Trained("e2e-guide", ["data=OUT/labels.jsonl", *BEST], "e2e-difflm"),
    "guide-e2e-diffusion-lm": Trained("e2e-guide", ["data=OUT/labels.jsonl", *BEST], "e2e-diffusion-lm"),
    "guide-e2e-twin": Trained("e2e-guide", ["data=OUT/labels.jsonl", *BEST], "e2e-twin"),
    "roc-difflm": Trained("roc"),
    "roc-diffusion-lm": Trained("roc", ["method=diffusion-lm", "lr=3e-4", "clip=0"]),
    "roc-twin": Trained("roc-twin", BEST),
    "roc-infill-twin": Trained("roc-infill-twin", BEST),
    "roc-mouth": Trained("roc", ["method=bert-mouth"]),
    "roc-judge": Trained("roc-twin", [*BEST, *SMALL]),
    "sentences-difflm": Trained("roc", [*SENTENCES, "longest=32"]),
    "sentences-diffusion-lm": Trained("roc", ["method=diffusion-lm", *SENTENCES, "longest=34", "lr=3e-4", "clip=0"]),
    "sentences-twin": Trained("roc-twin", [*SENTENCES, "longest=32", *BEST]),
    "sentences-judge": Trained("roc-twin", [*SENTENCES, "longest=40", *BEST, *SMALL]),
    "guide-sentences-twin": Trained("e2e-guide", ["data=OUT/sentences.jsonl", *BEST], "sentences-twin"),
}


def needs_weights(run: Trained) -> bool:
    return PRETRAINED[0] in run.changes


@dataclass(frozen=True)
class Plan:
    """What a command asks for."""

    what: str
    out: Path
    data: Path | None
    minutes: float
    guide_minutes: float
    seconds: float
    jobs: int
    targets: int
    choose: int
    each: int
    mbr: int
    labelled: int | None
    only: Sequence[str]
    given: Mapping[str, str]
    second_parser: Path | None
    pretrained: Path | None
    device: str
    one: str
    until: float
    more: Sequence[str]

    @property
    def results(self) -> Path:
        return self.out / "results.jsonl"

    @cached_property
    def runs(self) -> dict[str, Trained]:
        """Those whose recipes, decoders and pretrained weights are there."""
        from difflm.methods.rivals import DECODERS
        from difflm.training.recipe import known_recipes

        known = known_recipes()
        gibbs = "masked-lm-gibbs" in DECODERS
        found = {n: one for n, one in RUNS.items() if one.recipe in known and (gibbs or not n.endswith("mouth"))}
        return {n: one for n, one in found.items() if self.pretrained or n in self.given or not needs_weights(one)}

    def folder(self, run: str) -> str:
        return self.given.get(run, str(self.out / run))

    def has(self, run: str) -> bool:
        """Whether a run is trained; one that is given brings its classifiers along, if it has any."""
        from difflm.training.run import find_run

        guides = RUNS[run].guides
        own = guides in self.given and any(find_run(self.given[guides]).glob("guide*/"))
        return run in self.given or own or (self.out / run / "done").exists()

    def load(self, run: str) -> "TextDiffusion":
        """A run with its classifiers."""
        from difflm.app.commands.options import load_model

        lm = load_model(self.folder(run), self.device)
        if (self.out / f"guide-{run}" / "done").exists():
            lm.guided_by(self.out / f"guide-{run}")
        return lm

    def train(self, run: str) -> None:
        from difflm.training.recipe import load_recipe

        one = RUNS[run]
        changes = [change.replace("OUT", str(self.out)) for change in one.changes]
        changes = [change.replace("=PRETRAINED", f"={self.pretrained}") for change in changes]
        more = list(self.more)
        if one.guides:
            changes.append(f"model.guides={self.folder(one.guides)}")
            more = [change for change in more if not change.startswith(("more_than", "longest"))]  # the guided run's
        if PROMPTS[0] in one.changes and not (self.out / run).exists():
            copytree(self.out / "prompts" / "data", self.out / run / "data")
        minutes = self.guide_minutes if one.guides else self.minutes
        fixed = [*UNTIMED, "compile=false", "sample_every=0", *changes, *more]
        train_for_minutes(load_recipe(one.recipe, fixed), self.out / run, minutes, self.until, self.device, self.data)


# -- texts ------------------------------------------------------------------------------------------------------------


def write_once(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    from difflm.runtime.files import write_atomic

    if not path.exists():
        write_atomic(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def prepare(plan: Plan) -> None:
    """Write labels, targets to report and others to choose by, once. Without spaCy tags are the bundled tagger's, of
    labels and targets alike."""
    if not (plan.out / "choose.jsonl").exists():
        reported, others = draw_both(plan)
        write_once(plan.out / "targets.jsonl", (target.to_json() for target in reported))
        write_once(plan.out / "choose.jsonl", (target.to_json() for target in others))
    if not (plan.out / "tags.json").exists():
        from difflm.runtime.files import write_json

        write_json(plan.out / "tags.json", tag_e2e(plan))
    if not (plan.out / "labels.jsonl").exists():
        write_once(plan.out / "labels.jsonl", label_e2e(plan))
    if not (plan.out / "prompts.jsonl").exists():
        rows = (json.loads(line) for line in (plan.out / "labels.jsonl").read_text().splitlines())
        write_once(plan.out / "prompts.jsonl", ({k: v for k, v in row.items() if k != "shape"} for row in rows))
    if not (plan.out / "prompts" / "config.json").exists():
        read_prompts(plan)
    if not (plan.out / "sentences.jsonl").exists():
        write_once(plan.out / "sentences.jsonl", roc_sentences(plan))


def read_prompts(plan: Plan) -> None:
    """Learn the words of the prompts and read them once, since this takes minutes: the runs that are trained on them
    copy what was read."""
    import torch

    from difflm.runtime.files import write_checked
    from difflm.training.fit import prepare_model
    from difflm.training.recipe import load_recipe
    from difflm.training.texts import Setup

    folder = plan.out / "prompts"
    folder.mkdir(exist_ok=True)
    recipe = load_recipe("e2e-fine-tuning", [f"data={plan.out / 'prompts.jsonl'}"])
    ready = prepare_model(Setup(recipe, folder, torch.device("cpu"), lambda *_: None, plan.data, resume=False))
    write_checked(folder / "config.json", ready.config)


def e2e_words(plan: Plan) -> "tuple[list[E2EPair], list[list[str]]]":
    from difflm.data.corpora import e2e_path, read_e2e
    from difflm.data.words import split_words

    pairs = list(read_e2e(e2e_path(plan.data, "train")))[: plan.labelled]
    return pairs, [split_words(pair.text) for pair in pairs]


def tag_e2e(plan: Plan) -> list[str]:
    """Parts of speech of the training texts."""
    from difflm.controls.learned import checking_tagger

    return [" ".join(tags) for tags in checking_tagger().tags(e2e_words(plan)[1])]


def parse_chunk(words: list[list[str]]) -> "list[Tree]":
    import torch

    from difflm.annotators.parser import own_parser, parse_texts

    torch.set_num_threads(2)
    return parse_texts(own_parser(), words)


def label_e2e(plan: Plan) -> list[dict[str, Any]]:
    """Fields, tags, phrases and shapes of the training texts, parsed by as many processes as there are jobs."""
    from difflm.annotators.e2e_fields import FIELDS
    from difflm.annotators.trees import phrases, shapes

    pairs, words = e2e_words(plan)
    tagged = json.loads((plan.out / "tags.json").read_text())
    chunks = [words[k : k + CHUNK] for k in range(0, len(words), CHUNK)]
    with ProcessPoolExecutor(plan.jobs, get_context("spawn")) as pool:
        trees = chain.from_iterable(pool.map(parse_chunk, chunks))
        found = list(zip(pairs, map(str.split, tagged), trees, strict=True))
    return [
        {
            "text": pair.text,
            **{name: pair.fields.get(name) for name in FIELDS},
            "pos": tags,
            "tree": [list(span) for span in phrases(tree)],
            "shape": shapes(tree),
        }
        for pair, tags, tree in found
    ]


def draw_both(plan: Plan) -> "tuple[list[Target], list[Target]]":
    """Targets of E2E to report, and others, of other sentences, by which strengths are chosen. All runs have the words
    and hold the lengths of the bundled model, but for the two of diffusion-lm's ends."""
    from difflm.app.commands.options import load_model
    from difflm.controls.learned import checking_tagger
    from difflm.data.corpora import e2e_path, read_e2e
    from difflm.data.words import split_words
    from difflm.evaluation.targets import draw_targets

    lm, tagger = load_model("e2e", "cpu"), checking_tagger()
    pairs = [p for p in read_e2e(e2e_path(plan.data, "valid")) if len(split_words(p.text)) <= lm.model.max_words - 2]
    reported = draw_targets(PARTS, pairs, [lm], tagger, plan.targets, 0)
    used = {target.sentence for target in reported}
    rest = [pair for pair in pairs if pair.text not in used]
    return reported, draw_targets(PARTS, rest, [lm], tagger, plan.choose, 1)


def roc_sentences(plan: Plan) -> list[dict[str, Any]]:
    """Sentences of the training stories, each labelled with its place, in a random order."""
    from difflm.data.corpora import corpus
    from difflm.data.stories import whole

    stories = list(whole(corpus("roc", plan.data, "train")))
    rows = [{"text": text, "place": str(k + 1)} for story in stories for k, text in enumerate(story)]
    return random.Random(0).sample(rows, len(rows))


def concept_targets(plan: Plan, lm: "TextDiffusion", choose: bool) -> "tuple[list[Target], list[list[str]]]":
    """CommonGen's development set as targets, with the references of each: those whose concepts, and the words of one
    reference, the model knows. The first are reported, the next ones choose."""
    from difflm.data.tokenizers import UNK
    from difflm.evaluation.targets import Target
    from difflm.generation.requests import Request

    with gzip.open(Path(plan.data or "") / "commongen" / "dev.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    found: list[tuple[Target, list[str]]] = []
    for row in random.Random(0).sample(rows, len(rows)):
        concepts, scenes = row["concept_set"].split("#"), [" ".join(scene.split()) for scene in row["scene"]]
        known = [s for s, ids in zip(scenes, lm.tokenizer.encode_batch(scenes), strict=True) if UNK not in ids]
        if UNK not in lm.tokenizer.encode(" ".join(concepts)) and known and len(concepts) < 8:
            found.append((Target("contains", Request(contains=concepts), known[0]), scenes))
    here = found[plan.targets : plan.targets + plan.choose] if choose else found[: plan.targets]
    return [target for target, _ in here], [scenes for _, scenes in here]
