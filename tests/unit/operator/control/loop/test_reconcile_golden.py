"""Whole reconciles over a store in memory: what is written, told and posted, in which order, is what the case's file says.

`CATJ_UPDATE_GOLDEN=1 pytest tests/unit/operator/test_reconcile.py` writes the files anew; read the difference before it is kept.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from tests.support.reconciling import played, read

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.parent for path in GOLDEN.glob("*/input.yaml"))


@pytest.mark.parametrize("folder", CASES, ids=lambda folder: folder.name)
async def test_a_reconcile_does_what_its_case_says(folder: Path) -> None:
    done = json.loads(json.dumps(await played(folder)))
    expected = folder / "expected.yaml"
    if os.environ.get("CATJ_UPDATE_GOLDEN"):
        expected.write_text(yaml.safe_dump(done, sort_keys=False, width=120, allow_unicode=True))
    assert done == read(expected)
