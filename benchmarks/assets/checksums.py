"""Write the checksums of the bundled JSON files again, after somebody has changed one on purpose.

python -m benchmarks.assets.checksums

The weights stay as they are; a file whose weights do not match is refused.
"""

import hashlib
from pathlib import Path

from difflm.runtime.files import CHECKSUM, check_sha256, read_json, write_checked
from difflm.training.run import bundled_runs


def write_checksums(folder: Path) -> None:
    """Write the checksums of the JSON files of all bundled models, classifiers and annotators."""
    tagger = folder / "tagger" / "tagger.safetensors"
    write_checked(tagger.with_suffix(".json"), {"sha256": hashlib.sha256(tagger.read_bytes()).hexdigest()})
    for path in sorted({*folder.rglob("config.json"), *folder.rglob("parser.json"), *folder.rglob("tags.json")}):
        value = {key: part for key, part in read_json(path).items() if key != CHECKSUM}
        if "sha256" in value:
            check_sha256(path.with_name("model.safetensors"), value)
        write_checked(path, value)


if __name__ == "__main__":
    write_checksums(next(iter(bundled_runs().values())).parent)
