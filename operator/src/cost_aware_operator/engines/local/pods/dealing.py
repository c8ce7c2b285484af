"""What pods of one host may not share: addresses, ports of rendezvous, GPUs. Each is dealt out once at a time."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cost_aware_operator.engines.local.pods.launch import PodLaunch
from cost_aware_trainer.contract import RENDEZVOUS_PORT, RENDEZVOUS_PORTS

LOWEST_PORT = 20_000
"""Rendezvous ports go down to here, and stay below those that the kernel gives to connections."""
TRIES = 256
"""Addresses that are tried."""


class NothingToDealError(Exception):
    """All of it is taken for now. The text says what."""


@dataclass(frozen=True)
class Hand:
    """What one pod got."""

    address: str
    """Its address."""
    rendezvous_port: int
    """First port of its job's rendezvous."""
    devices: tuple[str, ...]
    """Its GPUs."""


def deal(
    uid: str,
    job_uid: str,
    ports: Sequence[int],
    devices: Sequence[str],
    devices_wanted: int,
    others: Iterable[PodLaunch],
) -> Hand:
    """Deals to one pod.

    Args:
        uid: the pod.
        job_uid: its training job; pods of one job share the rendezvous.
        ports: ports that have to be free on its address.
        devices: all GPUs of its node.
        devices_wanted: how many of them it asks for.
        others: pods that have not ended.

    Raises:
        NothingToDealError: something is not there, or not for now.
    """
    others = tuple(others)
    taken = {device for other in others for device in other.devices}
    free = [device for device in devices if device not in taken]
    if len(free) < devices_wanted:
        raise NothingToDealError(f"{devices_wanted} GPUs are asked for, and {len(free)} of {len(devices)} are free")
    used = {other.address for other in others}
    found = (a for a in addresses(uid) if a not in used and all(is_free(a, port) for port in ports))
    address = next(found, None)
    if address is None:
        raise NothingToDealError(f"no address of this host has the ports {', '.join(map(str, ports))} free")
    rendezvous = {other.job_uid or other.uid: other.rendezvous_port for other in others}
    port = rendezvous.get(job_uid or uid) or _rendezvous_port(job_uid or uid, set(rendezvous.values()))
    return Hand(address, port, tuple(free[:devices_wanted]))


def addresses(uid: str) -> Iterator[str]:
    """Loopback addresses to try for a pod, other ones for each: several of these programs may run on one host."""
    for number in range(TRIES):
        digest = hashlib.sha256(f"{uid}/{number}".encode()).digest()
        # 127.0.y.z is left to the system's own services
        yield f"127.{1 + digest[0] % 254}.{digest[1]}.{1 + digest[2] % 254}"


def is_free(address: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _rendezvous_port(job: str, used: set[int]) -> int:
    """The first of a hundred free ports; another one first for each job, as ranks listen there only once they are ordered to."""
    blocks = range(LOWEST_PORT, RENDEZVOUS_PORT + 1, RENDEZVOUS_PORTS)
    digest = hashlib.sha256(job.encode()).digest()
    begin = (digest[0] * 256 + digest[1]) % len(blocks)
    tried: list[int] = [*blocks[begin:], *blocks[:begin]]
    for first in tried:
        if first not in used and all(is_free("", port) for port in range(first, first + RENDEZVOUS_PORTS)):
            return first
    raise NothingToDealError(f"no {RENDEZVOUS_PORTS} ports in a row are free for ranks to meet")


def devices_asked(container: Mapping[str, object]) -> int:
    """GPUs that a container asks for."""
    resources = container.get("resources")
    for part in ("limits", "requests"):
        asked = resources.get(part) if isinstance(resources, Mapping) else None
        if isinstance(asked, Mapping) and asked.get("nvidia.com/gpu"):
            return int(asked["nvidia.com/gpu"])
    return 0
