import json

import pytest

from cost_aware_trainer.data.hashing import sha256_of_file, unwatched
from cost_aware_trainer.state.manifests import (
    CheckpointManifest,
    RunFacts,
    folder_name,
    newest_step,
    read_verified,
    write_manifest,
)
from cost_aware_trainer.state.retention import Retention, remove_leftovers, set_aside

FACTS = RunFacts(model={"layers": 1}, seed=0, global_samples=8, data_sha256="d")


@pytest.fixture
def checkpoint(tmp_path):
    def make(step, *, whole=True):
        folder = tmp_path / folder_name(step)
        folder.mkdir()
        (folder / "shard").write_bytes(b"x" * step)
        if whole:
            files = {"shard": sha256_of_file(folder / "shard")}
            write_manifest(
                folder,
                CheckpointManifest(
                    step=step, samples=8 * step, samples_checksum="0", attempt=1, run=FACTS, files=files
                ),
            )
        return folder

    return make


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def retention(tmp_path):
    return Retention(tmp_path, lambda: None, unwatched)


def cut(folder):
    (folder / "shard").write_bytes(b"")


def test_without_a_manifest_a_checkpoint_does_not_exist(checkpoint, tmp_path):
    checkpoint(5)
    checkpoint(9, whole=False)
    (tmp_path / ".saving-step-00000011-attempt-1").mkdir()
    (tmp_path / ".removing-step-00000004").mkdir()
    assert newest_step(tmp_path) == 5
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step-00000005"]


def test_a_checkpoint_that_lost_its_manifest_stays_where_no_other_is(checkpoint, tmp_path):
    folder = checkpoint(9, whole=False)
    (folder / ".metadata").write_bytes(b"m")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step-00000009"]
    checkpoint(5)
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step-00000005"]


@pytest.mark.parametrize("harm", ["truncate", "flip", "delete", "manifest", "rename"])
def test_damage_of_any_kind_is_found_when_a_checkpoint_is_read(checkpoint, tmp_path, harm):
    newest = checkpoint(10)
    assert read_verified(newest).step == 10
    shard = newest / "shard"
    match harm:
        case "truncate":
            shard.write_bytes(b"x")
        case "flip":
            shard.write_bytes(b"y" + shard.read_bytes()[1:])
        case "delete":
            shard.unlink()
        case "manifest":
            (newest / "manifest.json").write_text("{")
        case "rename":
            newest = newest.rename(tmp_path / folder_name(11))
    with pytest.raises(ValueError, match=r".+"):
        read_verified(newest)


def test_a_manifest_that_names_files_elsewhere_is_refused(checkpoint):
    folder = checkpoint(10)
    document = json.loads((folder / "manifest.json").read_text())
    del document["manifest_sha256"]
    document["files"] = {"../step-00000005/shard": "0"}
    (folder / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match="outside of its folder"):
        read_verified(folder)


def test_retention_keeps_the_newest_whole_ones_and_sets_damaged_ones_aside(checkpoint, tmp_path, retention):
    for step in (1, 2, 3, 4):
        checkpoint(step)
    retention.found_damaged("step-00000003")
    retention.tidy(2)
    assert names(tmp_path) == ["damaged-step-00000003-1", "step-00000002", "step-00000004"]


def test_retention_reads_what_it_keeps_before_it_removes_anything_older(checkpoint, tmp_path, retention):
    """Both of the newest two have rotted since they were written: the older one is all there is."""
    checkpoint(1)
    cut(checkpoint(2))
    cut(checkpoint(3))
    retention.tidy(2)
    assert names(tmp_path) == ["damaged-step-00000002-1", "damaged-step-00000003-1", "step-00000001"]
    retention.tidy(0)
    assert names(tmp_path)[-1] == "step-00000001"


def test_retention_removes_nothing_where_nothing_is_whole(checkpoint, tmp_path, retention):
    for step in (1, 2):
        cut(checkpoint(step))
    retention.tidy(1)
    assert names(tmp_path) == ["damaged-step-00000001-1", "damaged-step-00000002-1"]


def test_what_is_set_aside_never_takes_the_place_of_another(checkpoint, tmp_path):
    set_aside(checkpoint(2))
    set_aside(checkpoint(2))
    assert names(tmp_path) == ["damaged-step-00000002-1", "damaged-step-00000002-2"]


def test_the_end_of_a_run_does_not_wait_for_what_is_read(checkpoint, tmp_path):
    checkpoint(1)
    checkpoint(2)
    waits = []

    def pace(count):
        waits.append(count)
        if len(waits) == 1:
            closing.set()
            closed.wait(10)

    import threading

    closing, closed = threading.Event(), threading.Event()
    slow = Retention(tmp_path, lambda: None, pace)
    slow.start(1)
    assert closing.wait(10)
    threading.Timer(0.1, closed.set).start()
    slow.close()
    assert "step-00000002" in names(tmp_path)


def test_a_manifest_survives_its_file(checkpoint):
    folder = checkpoint(3)
    manifest = read_verified(folder)
    assert CheckpointManifest.from_document(manifest.to_document()) == manifest
