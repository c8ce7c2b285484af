"""Windows that are read from a store when they are needed are those of the file itself."""

import numpy as np
import pytest

from cost_aware_trainer.data import streaming
from cost_aware_trainer.data.stores import ENV_CACHE, StoreError
from cost_aware_trainer.data.streaming import ENV_STREAM, open_data
from cost_aware_trainer.data.token_files import Corpus, DataError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(ENV_CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_streamed_windows_are_those_of_the_file_and_only_they_are_asked_for(data_server, monkeypatch, cache):
    monkeypatch.setenv(ENV_STREAM, "always")
    mapped = Corpus.open(data_server.folder, 16, verify_hashes=True)
    streamed = open_data(data_server.address, 16, verify_hashes=True)
    assert streamed.windows == mapped.windows
    wanted = np.random.default_rng(0).integers(0, mapped.windows, 40).astype(np.uint64)
    data_server.requests.clear()
    assert (streamed.train_windows(wanted) == mapped.train_windows(wanted)).all()
    assert sorted({(name, asked) for _, name, asked in data_server.requests}) == sorted(
        {("train.bin", f"bytes={16 * w}-{16 * w + 16}") for w in wanted.astype(int)}
    )
    starts = mapped.heldout_windows(10)
    assert (streamed.heldout_tokens(starts) == mapped.heldout_tokens(starts)).all()
    assert not list(cache.rglob("train.bin")), "nothing of it is kept"


def test_data_are_copied_where_there_is_room_and_streamed_where_there_is_none(data_server, monkeypatch, cache):
    # the disk of a pod: as much room as the test says
    monkeypatch.setattr(streaming, "_free_bytes", lambda folder: 1000)
    open_data(data_server.address, 16, verify_hashes=True)
    assert not list(cache.rglob("train.bin"))
    monkeypatch.setattr(streaming, "_free_bytes", lambda folder: 10**12)
    open_data(data_server.address, 16, verify_hashes=True)
    assert len(list(cache.rglob("train.bin"))) == 1
    # a copy that is there is used, however little room is left
    monkeypatch.setattr(streaming, "_free_bytes", lambda folder: 0)
    data_server.requests.clear()
    open_data(data_server.address, 16, verify_hashes=True).train_windows(np.array([3], dtype=np.uint64))
    assert not [name for _, name, _ in data_server.requests if name == "train.bin"]


def test_a_passing_failure_is_tried_again_and_a_lasting_one_says_what_was_asked_for(data_server, monkeypatch):
    monkeypatch.setenv(ENV_STREAM, "always")
    monkeypatch.setattr("cost_aware_trainer.data.stores.FIRST_PAUSE_SECONDS", 0.0)
    streamed = open_data(data_server.address, 16, verify_hashes=True)
    data_server.faults["train.bin"] = [503, "cut"]
    one = np.array([5], dtype=np.uint64)
    expected = Corpus.open(data_server.folder, 16, verify_hashes=True).train_windows(one)
    assert (streamed.train_windows(one) == expected).all()
    data_server.faults["train.bin"] = [403]
    with pytest.raises(StoreError, match=r"train\.bin: 403"):
        streamed.train_windows(one)


def test_a_store_that_is_not_what_its_manifest_says_or_a_wrong_setting_is_refused(data_server, monkeypatch):
    monkeypatch.setenv(ENV_STREAM, "sometimes")
    with pytest.raises(DataError, match="write auto, always or never"):
        open_data(data_server.address, 16, verify_hashes=True)
    monkeypatch.setenv(ENV_STREAM, "always")
    with pytest.raises(DataError, match="hold no window of sequenceLength"):
        open_data(data_server.address, 10**9, verify_hashes=True)
    (data_server.folder / "train.bin").write_bytes(b"short")
    with pytest.raises(DataError, match="5 bytes in the store"):
        open_data(data_server.address, 16, verify_hashes=True)
