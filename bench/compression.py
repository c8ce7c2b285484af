"""What gradient compression gains between two hosts 100 Mbit/s apart, and costs between two ranks of one host.

python bench/compression.py [--mbit 100] [--mebibytes 32] [--repeats 3]

Two network namespaces, joined by a pair of virtual interfaces that `tc` shapes, are the two hosts; a rank in each sums
buckets as large as a model's gradients, with no computation to hide behind. Then the same over the loopback interface. Beside
each measurement stands what the planner's GradientCompressor says of the same link. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cost_aware_operator.costs.advice.compression import Compression, CompressionAdvice, GradientCompressor
from cost_aware_operator.costs.models.communication import Fabric, Link
from cost_aware_operator.costs.tables.hardware import Accelerator, AcceleratorGeneration

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 4 * 2**20
KINDS = tuple(Compression)
TARGETS = {Compression.INT8: 2.5, Compression.INT4: 4.0}
RENDEZVOUS_PORT = 29555
LIMIT_SECONDS = 300.0


@dataclass(frozen=True)
class Host:
    """Where a rank runs: the command that gets there, its interface and address."""

    command: tuple[str, ...]
    interface: str
    address: str


@dataclass(frozen=True)
class Report:
    """What rank 0 measured, all in seconds: steps and its own processor time by compression, medians."""

    seconds: dict[str, float]
    busy: dict[str, float]
    latency_seconds: float
    quantise_seconds: float
    """Of all buckets to int4 and back, without the wire."""


@contextlib.contextmanager
def two_hosts(mbit: float) -> Iterator[tuple[Host, Host]]:
    """Two network namespaces of this process's own, linked at `mbit` each way; removed again whatever happens."""
    spaces = [f"catj-{os.getpid()}-{end}" for end in "ab"]
    cables = [f"catj{os.getpid()}{end}" for end in "ab"]
    addresses = ["10.231.7.1", "10.231.7.2"]
    try:
        for space in spaces:
            call("ip", "netns", "add", space)
        # made inside the namespaces: nothing outside of them is touched
        call(
            "ip",
            "-n",
            spaces[0],
            "link",
            "add",
            cables[0],
            "type",
            "veth",
            "peer",
            "name",
            cables[1],
            "netns",
            spaces[1],
        )
        for space, cable, address in zip(spaces, cables, addresses, strict=True):
            call("ip", "-n", space, "link", "set", "lo", "up")
            call("ip", "-n", space, "address", "add", f"{address}/30", "dev", cable)
            call("ip", "-n", space, "link", "set", cable, "up")
            shape = f"tbf rate {mbit}mbit burst 32kb latency 100ms".split()
            call("tc", "-n", space, "qdisc", "add", "dev", cable, "root", *shape)
        first, second = (
            Host(("ip", "netns", "exec", space), cable, address)
            for space, cable, address in zip(spaces, cables, addresses, strict=True)
        )
        yield first, second
    finally:
        # with a namespace its interface goes, and with that its peer
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


def call(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}; this bench needs root and network namespaces")


def measure(hosts: Sequence[Host], mebibytes: int, repeats: int) -> Report:
    """Rank 0's report: median seconds of a step by compression, and the link as it measured it."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(RENDEZVOUS_PORT),
        "WORLD_SIZE": str(len(hosts)),
    }
    script = [sys.executable, str(Path(__file__).resolve()), "--rank", f"{mebibytes}", f"{repeats}"]
    ranks = [
        subprocess.Popen(
            [*host.command, *script],
            env=environment | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": host.interface},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        answers = [rank.communicate(timeout=LIMIT_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed, see above")
    return Report(**json.loads(answers[0]))


def latency_seconds() -> float:
    """How long one message between the ranks waits."""
    import torch
    import torch.distributed as dist

    ping = torch.zeros(1)
    started = time.perf_counter()
    for _ in range(20):
        dist.all_reduce(ping)
    return (time.perf_counter() - started) / 40


def quantise_seconds(buckets: list[Tensor], repeats: int) -> float:
    """What a rank computes for the buckets of two ranks, without the wire; the median of `repeats`."""
    import torch
    import torch.distributed as dist

    from cost_aware_trainer.distributed.compression.quantisation import BlockCodec

    codec, seconds = BlockCodec(4), []
    for _ in range(repeats + 1):
        dist.barrier()
        started = time.perf_counter()
        for bucket in buckets:
            halves = bucket.clone().view(2, -1)
            packed = torch.cat([codec.encode(halves[:1]), codec.encode(halves[1:])])
            halves.copy_(codec.decode(packed, halves.shape[1])).add_(codec.decode(packed[:1], halves.shape[1]))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def run_rank(mebibytes: int, repeats: int) -> None:
    """One of the two ranks; rank 0 prints its report as JSON."""
    import torch
    import torch.distributed as dist

    from cost_aware_trainer import contract
    from cost_aware_trainer.distributed.compression.sums import CompressedSum, Sum

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    elements = BUCKET_BYTES // 4
    buckets = [torch.randn(elements) for _ in range(mebibytes * 2**20 // BUCKET_BYTES)]
    layouts = [((f"bucket-{index}", elements),) for index in range(len(buckets))]

    def timed(compressed: CompressedSum | None) -> tuple[float, float]:
        """Wall seconds of summing all buckets, and processor seconds that this rank spent on them."""
        copies = [bucket.clone() for bucket in buckets]
        dist.barrier()
        wall_seconds, busy_seconds = time.perf_counter(), time.process_time()
        works: list[Sum | dist.Work | None]
        if compressed is None:
            works = [dist.all_reduce(copy, async_op=True) for copy in copies]
        else:
            works = [compressed.start(layout, copy) for layout, copy in zip(layouts, copies, strict=True)]
        for work in works:
            assert work is not None
            work.wait()
        return time.perf_counter() - wall_seconds, time.process_time() - busy_seconds

    sums = {
        kind: None if kind is Compression.NONE else CompressedSum(group, contract.Compression(kind.value))
        for kind in KINDS
    }
    seconds: dict[str, list[tuple[float, float]]] = {kind.value: [] for kind in KINDS}
    # in turn, so that a change of the machine's load meets all of them
    for turn in range(repeats + 1):
        for kind, compressed in sums.items():
            sample = timed(compressed)
            if turn:
                seconds[kind.value].append(sample)
    waited_seconds, codec_seconds = latency_seconds(), quantise_seconds(buckets, repeats)
    for compressed in sums.values():
        if compressed is not None:
            compressed.close()
    if dist.get_rank() == 0:
        medians = {kind: statistics.median(wall for wall, _ in of) for kind, of in seconds.items()}
        busy = {kind: statistics.median(busy for _, busy in of) for kind, of in seconds.items()}
        report = {"seconds": medians, "busy": busy, "latency_seconds": waited_seconds}
        print(json.dumps(report | {"quantise_seconds": codec_seconds}))
    dist.destroy_process_group()


def core(gbytes_per_second: float) -> Accelerator:
    """A processor core as the planner sees an accelerator: of it, only memory bandwidth matters here."""
    generation = next(iter(AcceleratorGeneration))
    return Accelerator(
        "core", generation, {}, 1.0, gbytes_per_second, None, "none", 1.0, 1, 1.0, "2026-11-21", "measured here"
    )


def advise(report: Report, mebibytes: int) -> CompressionAdvice:
    """The planner's answer for the link as the fp32 sum found it, and a core as fast as it quantised to int4, the slower one."""
    size_bytes = mebibytes * 2**20
    # two ranks send each byte once in an all-reduce
    link = Link(size_bytes / report.seconds["none"], report.latency_seconds)
    unit_seconds = GradientCompressor(core(1.0)).quantise_seconds(size_bytes / 4, 2, Compression.INT4)
    group = Fabric(1, link, link).group(2)
    compressor = GradientCompressor(core(unit_seconds / report.quantise_seconds))
    return compressor.advise(group, size_bytes / 4, 0.0, bucket_bytes=BUCKET_BYTES)


def show(title: str, report: Report, mebibytes: int, targets: dict[Compression, float]) -> bool:
    """Prints a table; whether the planner's answer fits what was measured, and all targets are met."""
    seconds, busy = report.seconds, report.busy
    advice = advise(report, mebibytes)
    planned = {option.compression: option.cost_seconds for option in advice.options}
    print(f"\n{title}: {mebibytes} MiB of fp32 gradients, two ranks")
    print(f"{'':6}  step ms  times faster  rank's own ms  planner's ms  planner's ratio")
    met = True
    for kind in KINDS:
        ratio = seconds["none"] / seconds[kind]
        target = f"  target {targets[kind]}" if kind in targets else ""
        missed = kind in targets and ratio < targets[kind]
        met &= not missed
        print(
            f"{kind:6} {1e3 * seconds[kind]:8.1f} {ratio:13.2f} {1e3 * busy[kind]:14.1f} {1e3 * planned[kind]:13.1f}"
            f" {planned[Compression.NONE] / planned[kind]:16.2f}{target}{' MISSED' if missed else ''}"
        )
    fastest = min(KINDS, key=lambda kind: seconds[kind])
    print(f"fastest: {fastest}; the planner: {advice.reason}")
    return met and advice.pays == (fastest is not Compression.NONE)


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        run_rank(int(sys.argv[2]), int(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="of the link between the two hosts, each way")
    parser.add_argument("--mebibytes", type=int, default=32, help="fp32 gradients of the model")
    parser.add_argument("--repeats", type=int, default=3, help="measurements, of which the median counts")
    options = parser.parse_args()
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool}: not found; install iproute2")
    with two_hosts(options.mbit) as hosts:
        slow = measure(hosts, options.mebibytes, options.repeats)
    good = show(f"{options.mbit:g} Mbit/s", slow, options.mebibytes, TARGETS)
    loopback = [Host((), "lo", "127.0.0.1")] * 2
    fast = measure(loopback, options.mebibytes, 5 * options.repeats)
    good &= show("loopback", fast, options.mebibytes, {})
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
