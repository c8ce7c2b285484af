"""Checkpoints of two ranks: whatever becomes of a file, damage is never loaded, and an older whole step is never lost."""

import json
import shutil

import pytest
from tests.support.ranks.pool import RankPool

RANKS = 2
FILES = ["manifest.json", ".metadata", "__0_0.distcp", "__1_0.distcp"]


@pytest.fixture(scope="module")
def pool(forkserver):
    pool = RankPool(forkserver, RANKS)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def written(pool, tmp_path_factory):
    """A folder with checkpoints of steps 5 and 10."""
    folder = tmp_path_factory.mktemp("written") / "run"
    pool.run(RANKS, "save_steps", folder=str(folder), steps=[5, 10])
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "run")


def harmed(newest, name, harm):
    """Harms a file of the newest checkpoint."""
    path, older = newest / name, newest.with_name("step-00000005")
    content = path.read_bytes()
    match harm:
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "empty":
            path.write_bytes(b"")
        case "flip":
            path.write_bytes(
                content[: len(content) // 2]
                + bytes([content[len(content) // 2] ^ 1])
                + content[len(content) // 2 + 1 :]
            )
        case "delete":
            path.unlink()
        case "another step's":
            shutil.copy(older / name, path)
        case "another rank's":
            other = {"__0_0.distcp": "__1_0.distcp", "__1_0.distcp": "__0_0.distcp"}.get(name, ".metadata")
            shutil.copy(newest / other if other != name else older / "manifest.json", path)


@pytest.mark.parametrize("harm", ["cut", "empty", "flip", "delete", "another step's", "another rank's"])
@pytest.mark.parametrize("name", FILES)
def test_damage_to_any_file_is_never_loaded_and_the_step_before_is(pool, folder, name, harm):
    harmed(folder / "step-00000010", name, harm)
    assert pool.run(RANKS, "resumed_step", folder=str(folder)) == [5, 5]
    assert (folder / "step-00000005" / "manifest.json").exists()


@pytest.mark.parametrize("key", ["tensors", "samples_checksum", "loss", "attempt", "run", "files"])
def test_a_digit_of_the_manifest_that_was_changed_is_noticed(pool, folder, key):
    path = folder / "step-00000010" / "manifest.json"
    document = json.loads(path.read_text())
    if key == "tensors":
        facts = document["tensors"]["model.w"]
        facts["checksum"] = f"{int(facts['checksum'], 16) ^ 1:016x}"
    elif key == "run":
        document["run"]["seed"] += 1
    elif key == "files":
        document["files"].popitem()
    else:
        document[key] = 7 if key != "samples_checksum" else f"{1:016x}"
    path.write_text(json.dumps(document))
    assert pool.run(RANKS, "resumed_step", folder=str(folder)) == [5, 5]


def test_a_manifest_without_a_checksum_of_its_own_is_read_and_its_damage_is_found_while_loading(pool, folder):
    path = folder / "step-00000010" / "manifest.json"
    document = json.loads(path.read_text())
    del document["manifest_sha256"]
    path.write_text(json.dumps(document))
    assert pool.run(RANKS, "resumed_step", folder=str(folder)) == [10, 10]
    facts = document["tensors"]["optimizer.state.w.exp_avg"]
    facts["checksum"] = f"{int(facts['checksum'], 16) ^ 1:016x}"
    path.write_text(json.dumps(document))
    assert pool.run(RANKS, "resumed_step", folder=str(folder)) == [5, 5]


def damage_all(folder):
    for number, path in enumerate(sorted(folder.glob("step-*/__0_0.distcp"))):
        harmed(path.parent, path.name if number else ".metadata", "cut")


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_when_all_checkpoints_are_damaged_the_run_stops_and_changes_nothing(pool, folder):
    damage_all(folder)
    before = contents(folder)
    for _ in range(2):
        answers = pool.run(RANKS, "resumed_step", folder=str(folder))
        assert len(set(answers)) == 1
        assert "InvalidRunError" in answers[0]
        assert "all 2 checkpoints" in answers[0]
        assert "step-00000010: " in answers[0]
        assert "checkpoint.onAllDamaged: Restart" in answers[0]
    assert contents(folder) == before


def test_with_restart_damaged_checkpoints_are_set_aside_and_the_run_begins(pool, folder):
    damage_all(folder)
    before = contents(folder)
    assert pool.run(RANKS, "resumed_step", folder=str(folder), policy="restart") == [0, 0]
    assert sorted(path.name for path in folder.iterdir()) == ["damaged-step-00000005-1", "damaged-step-00000010-1"]
    assert list(contents(folder).values()) == list(before.values())


def test_a_state_that_is_half_loaded_is_not_the_beginning_of_a_run(pool, folder):
    for path in folder.glob("step-*/manifest.json"):
        document = json.loads(path.read_text())
        del document["manifest_sha256"]
        document["tensors"]["model.w"]["checksum"] = "0" * 16
        path.write_text(json.dumps(document))
    answers = pool.run(RANKS, "resumed_step", folder=str(folder), policy="restart")
    assert "CheckpointError" in answers[0]
    assert "the next attempt starts at the first step" in answers[0]
    assert pool.run(RANKS, "resumed_step", folder=str(folder), policy="restart") == [0, 0]


def test_manifests_that_are_all_gone_are_damage_too_and_no_interrupted_save(pool, folder):
    for path in folder.glob("step-*/manifest.json"):
        path.unlink()
    assert "all 2 checkpoints" in pool.run(RANKS, "resumed_step", folder=str(folder))[0]
    assert len(list(folder.glob("step-*/.metadata"))) == 2
