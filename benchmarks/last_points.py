"""Ways to obey learned controls more often and more fluently: repair, resampled particles, other choices among
candidates, sizes of gaps. Each is tried on some targets and measured on others, which nobody has looked at.

  python -m benchmarks.last_points draw --data DIR --out runs/last-points --exclude targets.jsonl
  python -m benchmarks.last_points write --out runs/last-points --device cuda --jobs 4 --seconds 240
  python -m benchmarks.last_points check --out runs/last-points
  python -m benchmarks.last_points table --out runs/last-points

`draw` draws targets for choosing and for reporting from E2E's validation sentences, disjoint, and none with a sentence
of the excluded files; tags are spaCy's, so run it where spaCy is. `write` generates the texts of every setting, of
each control and set of targets a file in OUT/texts, with their nats under the judge: no checker is asked. What is not
finished after `--seconds` is continued by the next command. `check` asks the checkers of this machine, a line each in
OUT/checked.jsonl; where spaCy is missing, tags are left for a machine that has it. `table` chooses the setting of each
control on the choosing targets, and shows all settings on those, today's and the chosen one on the others.
A file of texts can also be measured by `difflm evaluate e2e --task control --targets OUT/held.jsonl --texts FILE`.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.timed import read_results, run_side_by_side

if TYPE_CHECKING:
    from difflm.evaluation.control import Protocol
    from difflm.evaluation.targets import Target
    from difflm.generation.pipeline import TextDiffusion

CONTROLS = ("length", "field", "pos", "tree", "span", "field+pos", "field+tree", "infill")
SETS = {"choose": 0.25, "held": 0.75}  # shares of the sentences
SEED = 22  # of the targets


# -- targets ----------------------------------------------------------------------------------------------------------


def draw_sets(data: Path, out: Path, excluded: Sequence[Path], counts: Mapping[str, int]) -> None:
    """Draw the targets of both sets from sentences that are in none of the excluded files, nor in the training texts,
    each sentence in one set alone."""
    from difflm.controls.learned import checking_tagger
    from difflm.data.e2e import e2e_path, read_e2e
    from difflm.evaluation.targets import draw, keep_fitting, read_targets, write_targets
    from difflm.generation.pipeline import TextDiffusion

    tagger = checking_tagger()
    if "spacy" not in tagger.name:
        raise SystemExit("tags of targets are spaCy's: draw them where it is installed.")
    used = {target.sentence for path in excluded for target in read_targets(path)}
    used |= {pair.text for pair in read_e2e(e2e_path(data, "train"))}
    valid = {pair.text: pair for pair in read_e2e(e2e_path(data, "valid")) if pair.text not in used}
    known = keep_fitting([*valid.values()], TextDiffusion.from_pretrained("e2e"))
    order, start = random.Random(SEED).sample(known, len(known)), 0
    for name, share in SETS.items():
        end = start + round(share * len(order))
        found = [one for control in CONTROLS for one in draw(control, order[start:end], tagger, counts[name], SEED)]
        write_targets(out / f"{name}.jsonl", found)
        print(f"{name}: {len(found)} targets of {end - start} sentences", flush=True)
        start = end
