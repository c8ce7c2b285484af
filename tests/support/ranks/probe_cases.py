"""What the ranks of a pool do about links."""

import time

import cost_aware_trainer.distributed.probe as probe


def probe_links(place, hosts, delay_seconds=0.0, bytes_per_second=None):
    """Probes, on a link that is slowed down as asked; and how long it took."""
    ranks = place.join("probe")
    if bytes_per_second:
        send = probe.dist.send

        def slow_send(message, peer):
            time.sleep(delay_seconds + message.numel() / bytes_per_second)
            send(message, peer)

        probe.dist.send = slow_send
    try:
        started = time.perf_counter()
        found = probe.probe_links(ranks, host=hosts[place.rank])
        return {level.value: facts for level, facts in found.items()}, time.perf_counter() - started
    finally:
        if bytes_per_second:
            probe.dist.send = send
