import threading

import pytest

from cost_aware_trainer.data.prefetch import Prefetcher


@pytest.fixture
def loaded():
    return []


@pytest.fixture
def prefetcher(loaded):
    def load(key):
        loaded.append((key, threading.current_thread().name))
        if key == "bad":
            raise OSError("disk")
        return key * 2

    prefetcher = Prefetcher(load)
    yield prefetcher
    prefetcher.close()


def test_what_was_foreseen_is_loaded_in_the_background_and_once(prefetcher, loaded):
    prefetcher.ahead([1, 2])
    assert [prefetcher.take(2), prefetcher.take(1)] == [4, 2]
    assert [key for key, _ in loaded] == [1, 2]
    assert all(thread.startswith("prefetch") for _, thread in loaded)


def test_what_nobody_foresaw_is_loaded_at_once(prefetcher, loaded):
    prefetcher.ahead([1])
    assert prefetcher.take(7) == 14
    assert (7, threading.current_thread().name) in loaded


def test_a_new_forecast_replaces_the_old_one(prefetcher, loaded):
    prefetcher.ahead([1])
    prefetcher.ahead([2])
    assert prefetcher.take(2) == 4
    assert prefetcher.take(1) == 2


def test_what_loading_raises_is_raised_where_the_value_is_taken(prefetcher):
    prefetcher.ahead(["bad"])
    with pytest.raises(OSError, match="disk"):
        prefetcher.take("bad")
