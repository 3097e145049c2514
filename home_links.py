"""Links that work outside of the repository: on the package's page (hatchling) and on the documentation site (mkdocs).

Both show files whose links lead to other files of the repository. They are made from the repository's address,
`[tool.hatch.metadata.hooks.custom] home` in pyproject.toml. While that is empty, the package has no URLs and its page
keeps the README as it is; on the site such a link is its text alone."""

import posixpath
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # mkdocs does not need it
    MetadataHookInterface = object

ROOT = Path(__file__).parent
# Code, in which nothing is a link; pictures and links.
MARKDOWN = re.compile(
    r"^( *)```.*?^\1```$|`[^`\n]*`|(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\(([^)\s]+)\)", re.DOTALL | re.MULTILINE
)


def replace_links(text: str, replace: Callable[[str, bool], str | None]) -> str:
    """Give every relative link a new target, by its target and whether it is a picture; None leaves its text alone."""

    def one(found: re.Match[str]) -> str:
        _, picture, label, target = found.groups()
        if target is None or re.match(r"#|[a-z]+:", target):
            return found[0]
        label, new = replace_links(label, replace), replace(target, bool(picture))
        return label if new is None else f"{picture}[{label}]({new})"

    return MARKDOWN.sub(one, text)


def at_home(home: str, path: str, picture: bool) -> str:
    return f"{home}/{'raw' if picture else 'blob'}/main/{path}"


class PackagePage(MetadataHookInterface):  # type: ignore[misc, unused-ignore]
    """The package's description and addresses."""

    def update(self, metadata: dict[str, Any]) -> None:
        text, home = (ROOT / "README.md").read_text(encoding="utf-8"), self.config["home"]
        if home:
            text = replace_links(text, lambda target, picture: at_home(home, target, picture))
            places = {"Documentation": "docs/README.md", "Changelog": "CHANGELOG.md"}
            metadata["urls"] = {"Repository": home} | {name: at_home(home, p, False) for name, p in places.items()}
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs with every page: what lies outside of docs/ is at the project's home."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    home = settings["tool"]["hatch"]["metadata"]["hooks"]["custom"]["home"]

    def outside(target: str, picture: bool) -> str | None:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), target))
        if path.startswith("docs/"):
            return target
        return at_home(home, path, picture) if home else None

    return replace_links(markdown, outside)
