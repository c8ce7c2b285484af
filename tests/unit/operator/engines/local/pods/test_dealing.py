"""What is dealt to pods of one host: never the same twice, other things for other programs on it."""

import pytest

from cost_aware_operator.engines.local.pods.dealing import NothingToDealError, addresses, deal
from cost_aware_operator.engines.local.pods.launch import PodLaunch


def launch(uid, hand, job_uid="job"):
    return PodLaunch(
        uid=uid, name=uid, namespace="team", node="node-0", job_uid=job_uid, address=hand.address, devices=hand.devices,
        rendezvous_port=hand.rendezvous_port, grace_seconds=1.0, command=(), environment={}, mounts={},
        working_folder="/", temporary_folder="/t",
    )  # fmt: skip


def test_pods_of_a_job_share_its_rendezvous_and_nothing_else():
    first = deal("a", "job", [], ["0", "1"], 1, [])
    second = deal("b", "job", [], ["0", "1"], 1, [launch("a", first)])
    stranger = deal("c", "other", [], ["0", "1"], 0, [launch("a", first), launch("b", second)])
    assert first.rendezvous_port == second.rendezvous_port != stranger.rendezvous_port
    assert len({first.address, second.address, stranger.address}) == 3
    assert (first.devices, second.devices, stranger.devices) == (("0",), ("1",), ())
    with pytest.raises(NothingToDealError, match="1 GPUs are asked for, and 0 of 1 are free"):
        deal("d", "job", [], ["0"], 1, [launch("a", first)])


def test_an_address_that_another_pod_holds_is_not_dealt_again():
    first = next(addresses("a"))
    assert deal("a", "job", [], [], 0, []).address == first
    held = launch("b", deal("a", "job", [], [], 0, []))
    assert deal("a", "job", [], [], 0, [held]).address != first


def test_addresses_are_loopback_s_and_none_of_the_system_s_own():
    for address in addresses("uid"):
        first, second, _, last = map(int, address.split("."))
        assert first == 127
        assert second > 0
        assert 0 < last < 255
