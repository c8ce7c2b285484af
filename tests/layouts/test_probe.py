import pytest


def test_both_levels_are_measured_and_known_to_all_ranks(pool):
    answers = pool.run(4, "probe_links", hosts=["a", "a", "b", "b"])
    found, _ = answers[0]
    assert set(found) == {"node", "network"}
    assert all(answer == found for answer, _ in answers)
    for facts in found.values():
        assert facts.pairs == 2
        assert 0 < facts.latency_seconds < 0.1
        assert facts.bytes_per_second > 1e7


def test_levels_that_a_run_does_not_have_are_left_out(pool):
    assert set(pool.run(2, "probe_links", hosts=["a", "a"])[0][0]) == {"node"}
    assert set(pool.run(2, "probe_links", hosts=["a", "b"])[0][0]) == {"network"}
    assert pool.run(1, "probe_links", hosts=["a"])[0][0] == {}


@pytest.mark.alone
def test_a_slow_link_is_measured_in_bounded_time(pool):
    """100 Mbit/s, 2 ms: no more than half a second, and right within a quarter."""
    found, seconds = pool.run(2, "probe_links", hosts=["a", "b"], delay_seconds=0.002, bytes_per_second=12.5e6)[0]
    assert seconds < 1.0
    # sleeping takes longer than asked on a busy machine
    assert found["network"].bytes_per_second == pytest.approx(12.5e6, rel=0.25)
    assert 0.001 < found["network"].latency_seconds < 0.01
