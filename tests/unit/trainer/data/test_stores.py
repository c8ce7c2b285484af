from concurrent.futures import ThreadPoolExecutor

import pytest

from cost_aware_trainer.data import stores
from cost_aware_trainer.data.stores import FolderStore, HttpStore, StoreError, local_folder, open_store
from cost_aware_trainer.data.token_files import Corpus, DataError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(stores, "open_store", lambda location: HttpStore(location, 0.5, 4, 0.001))
    return tmp_path / "cache"


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(stores, "PIECE_BYTES", 20_000)


def same(folder, other):
    return all(
        (folder / n).read_bytes() == (other / n).read_bytes() for n in ("train.bin", "heldout.bin", "manifest.json")
    )


@pytest.mark.usefixtures("small_pieces")
def test_a_data_set_comes_whole_in_pieces_and_only_once(data_server, cache):
    folder = local_folder(data_server.address, cache)
    assert same(folder, data_server.folder)
    assert Corpus.open(folder, 16, verify_hashes=True).windows > 0
    pieces = [r for r in data_server.requests if r[:2] == ("GET", "train.bin")]
    assert len(pieces) == -(-(data_server.folder / "train.bin").stat().st_size // 20_000) > 2
    data_server.requests.clear()
    assert local_folder(data_server.address, cache) == folder
    assert {name for _, name, _ in data_server.requests} == {"manifest.json"}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    "faults", [[500, 503, 429], ["cut", "cut"], ["slow"], [None, None, 500, None, "cut", None, "slow"]]
)
def test_passing_faults_are_survived(data_server, cache, faults):
    data_server.faults["train.bin"] = faults + [None] * 1000
    assert same(local_folder(data_server.address, cache), data_server.folder)


@pytest.mark.parametrize(("faults", "text"), [([500] * 20, "500"), (["slow"] * 20, "timed out")])
def test_lasting_faults_are_named_with_their_address(data_server, cache, faults, text):
    data_server.faults["heldout.bin"] = faults
    with pytest.raises(StoreError, match=rf"127\.0\.0\.1:\d+/set/heldout\.bin: .*{text}.*, 4 times in a row"):
        local_folder(data_server.address, cache)
    assert not list(cache.glob("*/manifest.json"))


def test_a_missing_file_is_not_asked_for_again(data_server, cache):
    (data_server.folder / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"manifest\.json: 404"):
        local_folder(data_server.address, cache)
    assert len(data_server.requests) == 1


def test_a_short_file_is_refused_with_both_sizes(data_server, cache):
    path = data_server.folder / "train.bin"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(StoreError, match=rf"train\.bin: 1000 bytes in the store, its manifest says {size}"):
        local_folder(data_server.address, cache)


def test_a_changed_byte_is_found_and_a_later_good_file_taken(data_server, cache):
    path = data_server.folder / "train.bin"
    good = path.read_bytes()
    path.write_bytes(b"\xff" + good[1:])
    with pytest.raises(StoreError, match=r"train\.bin: its SHA-256"):
        local_folder(data_server.address, cache)
    path.write_bytes(good)
    assert same(local_folder(data_server.address, cache), data_server.folder)


@pytest.mark.usefixtures("small_pieces")
def test_what_an_interrupted_try_has_got_is_kept(data_server, cache):
    data_server.faults["train.bin"] = [None, None, None, *[500] * 10]
    with pytest.raises(StoreError):
        local_folder(data_server.address, cache)
    data_server.faults.clear()
    data_server.requests.clear()
    assert same(local_folder(data_server.address, cache), data_server.folder)
    first = next(r for r in data_server.requests if r[:2] == ("GET", "train.bin"))
    assert first[2].startswith("bytes=40000-")


def test_ranks_of_one_host_fetch_once(data_server, cache):
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: local_folder(data_server.address, cache), range(4)))
    assert len(folders) == 1
    assert len([r for r in data_server.requests if r[:2] == ("GET", "train.bin")]) == 1


def test_a_server_without_ranges_is_refused(data_server, cache):
    data_server.ignores_ranges = True
    with pytest.raises(StoreError, match="use a server that has ranges"):
        local_folder(data_server.address, cache)


def test_a_manifest_that_is_none_is_refused(data_server, cache):
    (data_server.folder / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="not a data manifest"):
        local_folder(data_server.address, cache)


def test_a_folder_is_its_own_copy(data_folder):
    assert local_folder(str(data_folder)) == data_folder
    store = FolderStore(data_folder)
    content = (data_folder / "train.bin").read_bytes()
    assert store.size_bytes("train.bin") == len(content)
    assert store.read("train.bin", 5, 9) == content[5:9]
    with pytest.raises(StoreError, match=f"ends at byte {len(content)}"):
        store.read("train.bin", len(content) - 1, len(content) + 1)
    with pytest.raises(StoreError, match="No such file"):
        store.size_bytes("other.bin")


def test_an_unknown_scheme_says_what_is_known():
    with pytest.raises(StoreError, match="http:// or https://"):
        open_store("s3://bucket/data")
