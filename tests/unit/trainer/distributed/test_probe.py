import pytest

from cost_aware_trainer.distributed.probe import fit, pairs_between_hosts, pairs_of_hosts


@pytest.mark.parametrize(
    ("hosts", "inside", "between"),
    [
        (["a"], [], []),
        (["a", "a"], [(0, 1)], []),
        (["a", "b"], [], [(0, 1)]),
        (["a", "a", "b", "b"], [(0, 1), (2, 3)], [(0, 2), (1, 3)]),
        (["a", "a", "a", "b"], [(0, 1)], [(0, 3)]),
        (["a", "b", "a", "b", "c"], [(0, 2), (1, 3)], [(0, 1), (2, 3)]),
    ],
)
def test_ranks_pair_up_by_host_each_at_most_once(hosts, inside, between):
    assert pairs_of_hosts(hosts) == inside
    assert pairs_between_hosts(hosts) == between


def test_a_line_gives_back_its_waiting_and_its_speed():
    line = [(size, 0.002 + size / 5e6) for size in (1000, 10_000, 1_000_000)]
    assert fit(line) == pytest.approx((0.002, 5e6))


@pytest.mark.parametrize("samples", [[(1000, 0.01)], [(1000, 0.01), (2000, 0.005)]])
def test_too_few_or_odd_samples_still_give_positive_figures(samples):
    latency_seconds, bytes_per_second = fit(samples)
    assert latency_seconds > 0
    assert bytes_per_second > 0
