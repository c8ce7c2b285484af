import pytest

from cost_aware_trainer.data.token_files import sha256_of_file
from cost_aware_trainer.state.manifests import (
    CheckpointManifest,
    RunFacts,
    folder_name,
    newest_good,
    read_verified,
    remove_leftovers,
    retain,
    write_manifest,
)

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


def test_without_a_manifest_a_checkpoint_does_not_exist(checkpoint, tmp_path):
    checkpoint(5)
    checkpoint(9, whole=False)
    found, damaged = newest_good(tmp_path)
    assert found.step == 5
    assert damaged == []
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step-00000005"]


@pytest.mark.parametrize("harm", ["truncate", "flip", "delete", "manifest", "rename"])
def test_any_damage_makes_the_one_before_the_newest_good_one(checkpoint, tmp_path, harm):
    checkpoint(5)
    newest = checkpoint(10)
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
            newest.rename(tmp_path / folder_name(11))
    found, damaged = newest_good(tmp_path)
    assert found.step == 5
    assert len(damaged) == 1


def test_retention_keeps_the_newest_good_and_drops_damaged_ones(checkpoint, tmp_path):
    for step in (1, 2, 3, 4):
        checkpoint(step)
    retain(tmp_path, 2, damaged=["step-00000003"])
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


def test_retention_never_deletes_the_only_good_checkpoint(checkpoint, tmp_path):
    checkpoint(1)
    checkpoint(2)
    retain(tmp_path, 0, damaged=["step-00000002"])
    assert names(tmp_path) == ["step-00000001"]
    retain(tmp_path, 1, damaged=["step-00000001"])
    assert names(tmp_path) == ["step-00000001"]


def test_a_manifest_survives_its_file(checkpoint):
    folder = checkpoint(3)
    manifest = read_verified(folder)
    assert CheckpointManifest.from_document(manifest.to_document()) == manifest
