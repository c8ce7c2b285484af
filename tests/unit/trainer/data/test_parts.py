"""Files of tokens that are cut, overwritten or damaged, before and while they are read."""

import hashlib
import os
import time

import numpy as np
import pytest

from cost_aware_trainer.data.parts import BlockTable, DataError, FilePart, block_bytes_of, table_beside, table_path
from cost_aware_trainer.data.token_files import Corpus, DataManifest, main, sha256_of_file

BLOCK = block_bytes_of(0)
STARTS = np.array([10, BLOCK - 3, 3 * BLOCK + 5], dtype=np.int64)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(np.random.default_rng(0).integers(0, 255, 4 * BLOCK + 17, dtype=np.uint8).tobytes())
    BlockTable.of_file(path).write(table_path(path))
    return path


def opened(path, *, with_table=True):
    table = table_beside(path, sha256_of_file(path)) if with_table else None
    return FilePart(path, path.stat().st_size, table)


def overwrite(path, at, content):
    """In place, as `cp` and editors of binaries do; the file's time is another one afterwards."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)
    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns + 10**9))


def test_windows_are_the_file_s_bytes_also_across_blocks(path):
    content = path.read_bytes()
    found = opened(path).windows(STARTS, 20)
    assert [bytes(row) for row in found] == [content[start : start + 20] for start in STARTS.tolist()]


def test_a_table_survives_its_file_and_is_that_of_the_whole_file(path):
    table = table_beside(path, sha256_of_file(path))
    assert table == BlockTable.of_file(path)
    assert table[4] == hashlib.sha256(path.read_bytes()[4 * BLOCK :]).digest()


@pytest.mark.parametrize("with_table", [True, False])
def test_a_file_that_is_cut_while_it_is_read_is_named(path, with_table):
    part = opened(path, with_table=with_table)
    part.windows(STARTS, 20)
    os.truncate(path, 2 * BLOCK)
    with pytest.raises(DataError, match=r"train\.bin: .* it was cut while it was read"):
        part.windows(STARTS, 20)


@pytest.mark.parametrize("with_table", [True, False])
def test_a_file_that_is_overwritten_in_place_is_noticed_at_the_next_block_that_is_used(path, with_table):
    part = opened(path, with_table=with_table)
    part.windows(STARTS, 20)
    overwrite(path, 3 * BLOCK + 100, b"something else")
    part.windows(STARTS[:1], 20)
    with pytest.raises(DataError, match=rf"train\.bin: bytes {3 * BLOCK} to {4 * BLOCK} are not what .*overwritten"):
        part.windows(STARTS, 20)


def test_a_damaged_block_is_found_when_it_is_first_used(path):
    part = opened(path)
    with path.open("r+b") as file:
        file.seek(3 * BLOCK + 9)
        file.write(b"\xff\x00\xff")
    part.windows(STARTS[:2], 20)
    with pytest.raises(DataError, match="are not what its table of blocks says"):
        part.windows(STARTS, 20)


def test_a_file_that_only_got_another_time_is_read_on(path):
    part = opened(path)
    before = part.windows(STARTS, 20)
    os.utime(path)
    assert (part.windows(STARTS, 20) == before).all()


def test_a_table_of_another_file_and_a_damaged_one_are_refused(path):
    with pytest.raises(DataError, match=r"of another train\.bin; run `python -m cost_aware_trainer.data blocks"):
        table_beside(path, "0" * 64)
    table = table_path(path)
    table.write_bytes(table.read_bytes()[:-40])
    with pytest.raises(DataError, match="its own checksum differs"):
        table_beside(path, sha256_of_file(path))


def test_a_large_file_without_a_table_is_verified_behind_the_run_which_learns_of_it(path):
    part = opened(path, with_table=False)
    part.verify_behind("0" * 64)

    def read_on():
        for _ in range(1000):
            part.windows(STARTS, 20)
            time.sleep(0.01)

    with pytest.raises(DataError, match="its SHA-256 is not the manifest's"):
        read_on()


def test_a_large_file_is_opened_without_being_read(tmp_path, data_folder):
    """200 GB that take no space: their hash would take minutes."""
    manifest = DataManifest.read(data_folder)
    size_bytes = 200 * 10**9
    (tmp_path / "heldout.bin").write_bytes((data_folder / "heldout.bin").read_bytes())
    with (tmp_path / "train.bin").open("wb") as file:
        file.truncate(size_bytes)
    document = manifest.to_json().replace(f'"bytes": {manifest.train.bytes}', f'"bytes": {size_bytes}')
    (tmp_path / "manifest.json").write_text(document)
    read = []
    corpus = Corpus.open(tmp_path, 16, verify_hashes=True, on_bytes=read.append)
    assert not corpus.train_windows(np.array([corpus.windows - 1, 5], dtype=np.uint64)).any()
    corpus.close()
    assert sum(read) < 10**9


def test_tables_are_made_for_a_data_set_that_has_none(tmp_path, data_folder, capsys):
    for name in ("train.bin", "heldout.bin", "manifest.json"):
        (tmp_path / name).write_bytes((data_folder / name).read_bytes())
    assert main(["blocks", "--data", str(tmp_path)]) == 0
    assert (tmp_path / "train.blocks").read_bytes() == (data_folder / "train.blocks").read_bytes()
    (tmp_path / "train.bin").write_bytes(b"other")
    assert main(["blocks", "--data", str(tmp_path)]) == 1
    assert "train.bin: its SHA-256 is not the manifest's" in capsys.readouterr().err
