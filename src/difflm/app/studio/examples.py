"""Requests that show what a bundled model does well: the studio's page opens with the first, and offers the others."""

import json
from pathlib import Path
from typing import Any

EXAMPLES: dict[str, dict[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
