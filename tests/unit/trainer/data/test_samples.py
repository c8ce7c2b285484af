import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_aware_trainer.data.samples import SampleOrder, Shard, add_checksums, checksum, expected_checksum, permute


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_an_epoch_holds_every_window_exactly_once(size, key):
    permuted = permute(np.arange(size, dtype=np.uint64), size, key)
    assert sorted(permuted.tolist()) == list(range(size))


def test_epochs_and_seeds_shuffle_differently():
    first, second = (SampleOrder(500, 1).at(np.arange(a, a + 500, dtype=np.uint64)).tolist() for a in (0, 500))
    other_seed = SampleOrder(500, 2).at(np.arange(500, dtype=np.uint64)).tolist()
    assert sorted(first) == sorted(second) == sorted(other_seed)
    assert first != second
    assert first != other_seed
    assert sum(i == w for i, w in enumerate(first)) < 20


@given(
    windows=st.integers(2, 400),
    degree_log=st.integers(0, 3),
    micro_log=st.integers(0, 3),
    steps=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None)
def test_the_checksum_is_the_same_for_every_degree_and_micro_batch(windows, degree_log, micro_log, steps, seed):
    order, total = SampleOrder(windows, seed), 0
    for rank in range(2**degree_log):
        shard = Shard(64, rank, 2**degree_log)
        for step in range(steps):
            for positions in shard.micro_batch_positions(step, 2**micro_log):
                total = add_checksums(total, checksum(positions, order.at(positions)))
    assert total == expected_checksum(windows, seed, 64, steps)


def test_the_checksum_notices_samples_missing_twice_or_exchanged():
    positions = np.arange(100, dtype=np.uint64)
    windows = SampleOrder(1000, 5).at(positions)
    whole = checksum(positions, windows)
    exchanged = windows.copy()
    exchanged[[3, 4]] = exchanged[[4, 3]]
    assert whole != checksum(positions[1:], windows[1:])
    assert whole != add_checksums(whole, checksum(positions[:1], windows[:1]))
    assert whole != checksum(positions, exchanged)
    assert whole == checksum(positions[::-1].copy(), windows[::-1].copy())
