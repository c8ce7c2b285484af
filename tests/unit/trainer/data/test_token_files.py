import json

import numpy as np
import pytest

from cost_aware_trainer.data.token_files import Corpus, DataError, DataManifest, main, prepare


def test_every_byte_of_the_sources_is_in_exactly_one_part(data_folder, source_folder):
    manifest = DataManifest.read(data_folder)
    parts = b"".join((data_folder / f"{split}.bin").read_bytes() for split in ("train", "heldout"))
    assert len(manifest.files) == 150
    assert sorted(parts.rstrip(b"\0").split(b"\0")) == sorted(p.read_bytes() for p in source_folder.glob("*.py"))
    assert 0 < manifest.heldout.bytes < 0.1 * manifest.train.bytes


def test_preparing_again_changes_nothing_and_says_so(data_folder, source_folder, capsys):
    before = {path.name: path.stat().st_mtime_ns for path in data_folder.iterdir()}
    assert main(["prepare", "--output", str(data_folder), "--source", str(source_folder)]) == 0
    assert "already prepared" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in data_folder.iterdir()} == before


def test_two_preparations_are_byte_for_byte_equal(data_folder, source_folder, tmp_path):
    prepare(tmp_path, source_folder)
    for name in ("train.bin", "heldout.bin", "manifest.json"):
        assert (tmp_path / name).read_bytes() == (data_folder / name).read_bytes()


def test_damaged_data_is_prepared_again(source_folder, tmp_path):
    prepare(tmp_path, source_folder)
    good = (tmp_path / "train.bin").read_bytes()
    (tmp_path / "train.bin").write_bytes(b"x" + good[1:])
    assert prepare(tmp_path, source_folder)
    assert (tmp_path / "train.bin").read_bytes() == good


def test_a_truncated_part_is_refused_with_its_size(source_folder, tmp_path):
    prepare(tmp_path, source_folder)
    (tmp_path / "train.bin").write_bytes((tmp_path / "train.bin").read_bytes()[:100])
    with pytest.raises(DataError, match=r"train\.bin: 100 bytes, its manifest says"):
        Corpus.open(tmp_path, 16, verify_hashes=False)


def test_a_changed_byte_is_found_by_hash(source_folder, tmp_path):
    prepare(tmp_path, source_folder)
    content = bytearray((tmp_path / "heldout.bin").read_bytes())
    content[5] ^= 1
    (tmp_path / "heldout.bin").write_bytes(content)
    Corpus.open(tmp_path, 16, verify_hashes=False)
    with pytest.raises(DataError, match="SHA-256"):
        Corpus.open(tmp_path, 16, verify_hashes=True)


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"format_version": 99}), "null"])
def test_a_foreign_manifest_is_refused(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match="manifest"):
        DataManifest.read(tmp_path)


def test_an_empty_folder_says_how_to_prepare_it(tmp_path):
    with pytest.raises(DataError, match=r"cost_aware_trainer\.data prepare --output"):
        Corpus.open(tmp_path, 16, verify_hashes=False)


def test_windows_overlap_by_the_one_byte_that_is_target_and_input(data_folder):
    corpus = Corpus.open(data_folder, 16, verify_hashes=True)
    tokens = corpus.train_windows(np.array([0, 1, corpus.windows - 1], dtype=np.uint64))
    assert tokens.shape == (3, 17)
    assert tokens[0, -1] == tokens[1, 0] == (data_folder / "train.bin").read_bytes()[16]


def test_too_long_a_sequence_is_refused(data_folder):
    with pytest.raises(DataError, match="sequenceLength of at most"):
        Corpus.open(data_folder, 10**7, verify_hashes=False)
