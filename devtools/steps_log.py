"""Reading the log of steps while a rank may be writing it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def steps_of(path: Path) -> list[dict[str, Any]]:
    """Entries of all whole lines; of a line that is being written a reader may see a part."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
