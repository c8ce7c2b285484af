"""Storage that takes much longer than a collective may: runs start, save and go on nevertheless."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys

import pytest
from tests.support import ROOT
from tests.support.ranks.runs import free_ports

from cost_aware_trainer.contract import ModelPlan
from cost_aware_trainer.data.parts import BlockTable, block_bytes_of
from cost_aware_trainer.data.token_files import DataManifest

TIMEOUT_SECONDS = 2
BYTES_PER_SECOND = 5_000_000
SIZE_BYTES = 200 * 10**9
MODEL = ModelPlan(layers=2, hidden=256, heads=4, kv_heads=4, ffn=800, sequence_length=16, vocabulary=256)


@pytest.fixture
def sparse_data(tmp_path, data_folder):
    """200 GB of zeros that take no space."""
    folder = tmp_path / "data"
    folder.mkdir()
    train = DataManifest.read(data_folder).train
    for name in ("heldout.bin", "heldout.blocks"):
        (folder / name).write_bytes((data_folder / name).read_bytes())
    with (folder / "train.bin").open("wb") as file:
        file.truncate(SIZE_BYTES)
    text = (data_folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace(f'"bytes": {train.bytes}', f'"bytes": {SIZE_BYTES}'))
    block_bytes = block_bytes_of(SIZE_BYTES)
    whole, rest = divmod(SIZE_BYTES, block_bytes)
    digests = hashlib.sha256(bytes(block_bytes)).digest() * whole
    digests += hashlib.sha256(bytes(rest)).digest() if rest else b""
    BlockTable(SIZE_BYTES, train.sha256, block_bytes, digests).write(folder / "train.blocks")
    return folder


@pytest.mark.parametrize(
    "has_table", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["with a table of blocks", "without"]
)
def test_200_gb_of_data_and_a_slow_volume_start_save_and_resume_within_short_collectives(
    make_plan, sparse_data, tmp_path, has_table
):
    if not has_table:
        (sparse_data / "train.blocks").unlink()
    plan = dataclasses.replace(make_plan("slow", data=2, model=MODEL), data_folder=str(sparse_data))
    (tmp_path / "plan.json").write_text(plan.to_json())
    port = free_ports(1)
    environment = {**os.environ, "CATJ_COLLECTIVE_TIMEOUT_SECONDS": str(TIMEOUT_SECONDS)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    arguments = [str(port), str(tmp_path / "plan.json"), str(BYTES_PER_SECOND)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.ranks.slow_store", str(rank), *arguments],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    answers = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], answers
    for out, _ in answers:
        first, second = json.loads(out.splitlines()[-1])
        assert (first["step"], second["step"]) == (1, 2)
        # each took longer than any collective may: the save, and verifying and loading
        assert first["seconds"][1] > TIMEOUT_SECONDS * 1.2
        assert second["seconds"][0] > TIMEOUT_SECONDS * 1.2
        # nobody has read the data as a whole
        assert second["bytes"] < SIZE_BYTES / 100
