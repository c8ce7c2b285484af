"""What `catj plan -o json` prints of the examples and of twelve other manifests, kept as files."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from cost_aware_operator.cli.main import main

GOLDEN = Path(__file__).parent / "golden" / "plan"
EXAMPLES = Path(__file__).resolve().parents[4] / "examples"
MANIFESTS = sorted([*GOLDEN.glob("*.yaml"), *EXAMPLES.glob("*.yaml")], key=lambda path: path.stem)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_is_planned_as_it_was(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CATJ_UPDATE_GOLDEN=1 writes the files anew; read the difference before you commit it."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--top", "5", "-o", "json", str(manifest)])
    said = capsys.readouterr()
    answer, refusal = GOLDEN / f"{manifest.stem}.json", GOLDEN / f"{manifest.stem}.err"
    refused = said.err.replace(str(manifest), "-")
    if os.environ.get("CATJ_UPDATE_GOLDEN"):
        for path, text in ((answer, said.out), (refusal, refused)):
            path.unlink(missing_ok=True)
            if text:
                path.write_text(text)
    assert ended.value.code == (2 if refusal.exists() else 0)
    if refusal.exists():
        assert refused == refusal.read_text()
    else:
        _equal(json.loads(said.out), json.loads(answer.read_text()), manifest.stem)


def _equal(found: Any, expected: Any, where: str) -> None:
    """Equal in every key and word; numbers to nine digits, as processors differ in the last ones."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), where
        assert list(found) == list(expected), where
        for key, value in expected.items():
            _equal(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert isinstance(found, list), where
        assert len(found) == len(expected), where
        for place, value in enumerate(expected):
            _equal(found[place], value, f"{where}[{place}]")
    elif isinstance(expected, float):
        assert isinstance(found, int | float), where
        assert math.isclose(found, expected, rel_tol=1e-9), f"{where}: {found} is not {expected}"
    else:
        assert found == expected, where
