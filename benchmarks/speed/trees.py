"""Two trees of the code on one machine: each builds its cases in a process of its own, and their calls alternate.

  python benchmarks/speed/trees.py OLD NEW --only "e2e, " --seconds 200

A tree is a checkout of the repository. A row is the median of five to nine alternating calls of each, in milliseconds;
`spread` is the median distance of the old tree's calls from their median. Cases whose name contains none of the words
of --only are not built: compiling those of training takes two minutes of both together.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

REPEATS, MOST_REPEATS, SECONDS = 5, 9, 4.0  # more repeats while a row takes less than so many seconds
TAGS = "DET PROPN PROPN AUX DET ADJ NOUN VERB ADJ NOUN PUNCT"
Case = tuple[Callable[[], object], int]  # what is timed, and how many steps or texts at once it makes


def list_cases(stack: ExitStack) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of cases, and how they are built; with the functions of this process's own tree."""
    import torch

    from benchmarks.speed import large
    from benchmarks.speed.rows import time_batch
    from difflm import Field, Length, Tags, TextDiffusion
    from difflm.app import bench
    from difflm.training.recipe import load_recipe

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    size, many = (large.SMALL, 1024) if on_gpu else (large.TINY, 3)

    def train(recipe: Any, vocabulary: int, texts: int, words: int) -> Case:
        _, step, _ = stack.enter_context(bench.training_step(recipe, vocabulary, device, texts, words))
        rows = 16 if on_gpu else 1
        return lambda: [step() for _ in range(rows)], rows

    def generate(name: str, texts: int, **asked: Any) -> Case:
        lm = TextDiffusion.from_pretrained(name, str(device))
        return lambda: lm.generate(texts, seed=0, **asked), 1

    def sample(method: str, texts: int, steps: int) -> Case:
        large.build_inference.cache_clear()
        return time_batch(large.build_inference(size, method, device), texts, 512 if on_gpu else 32, device, steps)[
            1
        ], 1

    for method in ("mdlm", "autoregressive"):
        sizes = size.vocabulary, size.texts, size.words
        yield f"train {method}, GPT-2's size", partial(train, size.recipe(method), *sizes)
    for name, texts in (("e2e-diffusion-lm-87m", 64), ("e2e-diffusion-lm-87m", 1024), ("e2e", 512)) if on_gpu else ():
        recipe = load_recipe(name)
        words = min(recipe.longest, 64 if "87m" in name else 32)
        yield f"train {name}, {texts} x {words}", partial(train, recipe, 821, texts, words)
    for texts in (1, 50, many):
        yield f"e2e, {texts} texts, 20 steps", partial(generate, "e2e", texts, steps=20)
    for control in (Length(14), Field("food", "Japanese"), Tags(TAGS)):
        yield f"e2e, {control.name}, 50 texts", partial(generate, "e2e", 50, steps=20, controls=[control])
    field = [Field("food", "Japanese")]
    yield f"e2e, field, {many} texts", partial(generate, "e2e", many, steps=20, controls=field)
    for texts in (50, many):
        yield f"e2e-fast, {texts} texts", partial(generate, "e2e-fast", texts)
    for texts in (1, 16):
        yield f"mdlm, GPT-2's size, {texts} texts, 64 steps", partial(sample, "mdlm", texts, 64)
    yield "block-diffusion, GPT-2's size, 1 text", partial(sample, "block-diffusion", 1, 16)


def serve(only: list[str]) -> None:
    """Build the cases, then answer each name on stdin with milliseconds of one call."""
    import torch

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the library prints
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    with ExitStack() as stack:
        cases: dict[str, Case] = {}
        for name, build in list_cases(stack):
            if only and not any(word in name for word in only):
                continue
            try:
                cases[name] = build()
                for _ in range(4):
                    cases[name][0]()
            except Exception as error:  # the other cases do not depend on it
                cases.pop(name, None)
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        answers.write("|".join(cases) + "\n")
        for line in sys.stdin:
            run, steps = cases[line.strip()]
            wait()
            begun = time.perf_counter()
            run()
            wait()
            answers.write(f"{1000 * (time.perf_counter() - begun) / steps}\n")


class Tree:
    """A process that runs the cases of one tree."""

    def __init__(self, root: Path, only: list[str]) -> None:
        env = os.environ | {"PYTHONPATH": os.pathsep.join([f"{root}/src", str(root), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", "--only", *only]
        self.process = subprocess.Popen(
            command, cwd=root, env=env, text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def read(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def time(self, name: str) -> float:
        assert self.process.stdin
        self.process.stdin.write(name + "\n")
        return float(self.read())


def compare(trees: tuple[Tree, Tree], name: str) -> tuple[float, float, float]:
    taken: tuple[list[float], list[float]] = ([], [])
    begun = time.monotonic()
    for tree in trees:
        tree.time(name)
    for repeat in range(MOST_REPEATS):
        for side in (0, 1) if repeat % 2 else (1, 0):
            taken[side].append(trees[side].time(name))
        if repeat + 1 >= REPEATS and time.monotonic() - begun > SECONDS:
            break
    before, after = map(statistics.median, taken)
    return before, after, statistics.median(abs(one - before) for one in taken[0]) / before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, help="the old checkout and the new one")
    parser.add_argument("--only", nargs="*", default=[], help="words of the names of cases")
    parser.add_argument("--seconds", type=float, default=600.0, help="no row is begun after so many")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        return serve(asked.only)
    if len(asked.trees) != 2:
        parser.error("give two checkouts: the old one and the new one.")
    if missing := [str(root) for root in asked.trees if not (root / "src" / "difflm").is_dir()]:
        parser.error(f"no checkout of difflm: {', '.join(missing)}.")
    begun, trees = time.monotonic(), (Tree(asked.trees[0], asked.only), Tree(asked.trees[1], asked.only))
    known = [tree.read().split("|") for tree in trees]
    print(f"{'':<44}{'before, ms':>12}{'after, ms':>12}{'change':>10}{'spread':>9}", flush=True)
    for name in (name for name in known[0] if name in known[1]):
        if time.monotonic() - begun > asked.seconds:
            print("no time is left for the other rows.")
            break
        before, after, spread = compare(trees, name)
        print(f"{name:<44}{before:>12.3f}{after:>12.3f}{after / before - 1:>+10.1%}{spread:>9.1%}", flush=True)
    for tree in trees:
        tree.process.kill()


if __name__ == "__main__":
    main()
