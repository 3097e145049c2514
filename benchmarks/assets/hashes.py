"""The checksums of what `make` installs: `python -m benchmarks.assets.hashes INDEX` asks the index of packages at this
address for those of constraints.txt and writes hashes.txt, with the wheels of every Python and machine that difflm runs
on. torch is left out: its build differs by machine. So are the extras, which `make` does not install."""

import html
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import requests
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

PYTHONS = ("cp311", "cp312", "cp313")
MACHINES = ("x86_64", "aarch64", "arm64", "universal2", "win_amd64", "any")
NEEDED = ("x86_64", "aarch64")  # where `make` must work
LINK = re.compile(r'<a [^>]*href="[^"#]*#sha256=([0-9a-f]{64})"[^>]*>([^<]+\.whl)</a>')
FOLDER = Path(__file__).parents[2]
EXTRAS = "# The extras"  # the heading of what `make` does not install
NOTE = (
    "# Checksums of constraints.txt, torch and the extras aside. Written by: python -m benchmarks.assets.hashes INDEX\n"
)


def read_pins(path: Path) -> Iterator[tuple[str, str]]:
    """Yield name and version of what `make` installs, torch aside."""
    for line in path.read_text(encoding="utf-8").split(EXTRAS)[0].splitlines():
        name, equals, version = line.partition("==")
        if equals and not line.startswith("#") and name != "torch":
            yield name, version


def runs_here(tag: Tag) -> bool:
    """Whether a wheel of this tag is for one of our Pythons and machines."""
    python = tag.interpreter in (*PYTHONS, "py3") or tag.abi == "abi3"
    linux_or_other = not tag.platform.startswith("musllinux")
    return python and not tag.abi.endswith("t") and linux_or_other and tag.platform.endswith(MACHINES)


def find_wheels(page: str, version: str) -> dict[str, set[Tag]]:
    """The checksums of the wheels of a version on a page of the index, with the tags of each that count here."""
    found = {}
    for digest, file in LINK.findall(page):
        try:
            _, built, _, tags = parse_wheel_filename(html.unescape(file).strip())
        except InvalidWheelFilename:  # of old versions
            continue
        if built == Version(version) and (here := {tag for tag in tags if runs_here(tag)}):
            found[digest] = here
    return found


def missing_wheels(wheels: dict[str, set[Tag]]) -> list[str]:
    """Pythons and machines that none of the wheels is for."""
    tags = [tag for some in wheels.values() for tag in some]
    return [
        f"{python} on {machine}"
        for python in PYTHONS
        for machine in NEEDED
        if not any(
            tag.platform.endswith((machine, "any"))
            and (
                tag.interpreter in (python, "py3")
                or (tag.abi == "abi3" and int(tag.interpreter[3:]) <= int(python[3:]))
            )
            for tag in tags
        )
    ]


def main() -> int:
    lines, faults = [NOTE], []
    for name, version in read_pins(FOLDER / "constraints.txt"):
        answer = requests.get(f"{sys.argv[1].rstrip('/')}/{canonicalize_name(name)}/", timeout=60)
        answer.raise_for_status()
        wheels = find_wheels(answer.text, version)
        faults += [f"{name} {version}: no wheel for {one}" for one in missing_wheels(wheels)]
        lines.append(f"{name}=={version}" + "".join(f" \\\n    --hash=sha256:{one}" for one in sorted(wheels)) + "\n")
    print(*faults, sep="\n", file=sys.stderr)
    (FOLDER / "hashes.txt").write_text("".join(lines), encoding="utf-8")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
