"""Nodes: accelerators with their links, and the hardware of instance types from the table of their list prices."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from cost_aware_operator.costs.models.communication import Fabric, Link
from cost_aware_operator.costs.models.compute import Parameters
from cost_aware_operator.costs.tables.hardware import Accelerator, HardwareError, accelerator

CPU_CORES = 4
"""Cores of one `CPU` row in accelerators.csv."""

USABLE_MEMORY = 0.985
"""Share of an accelerator's memory that a process gets (torch reports 39.4 GiB of an A100's 40); the driver keeps the rest."""


@dataclass(frozen=True)
class Machine:
    """Accelerators in nodes."""

    accelerator: Accelerator
    """The accelerator."""
    gpus_per_node: int
    """Accelerators of one node."""
    link_gbytes_per_s: float
    """Link of one accelerator inside the node, one direction, 1e9 bytes a second."""
    network_gbit_per_s: float
    """Network of the whole node, 1e9 bits a second."""

    def fabric(self, parameters: Parameters) -> Fabric:
        """Links at the rates that collectives reach."""
        return Fabric(
            self.gpus_per_node,
            Link(self.link_gbytes_per_s * 1e9 * parameters.node_link, parameters.node_latency_seconds),
            Link(self.network_gbit_per_s / 8 * 1e9 * parameters.network, parameters.network_latency_seconds),
        )


def usable_gib(machine: Machine) -> float:
    """GiB of an accelerator's memory that a process gets."""
    return USABLE_MEMORY * machine.accelerator.memory_gib


def machine(instance_type: str) -> Machine:
    """A node of an instance type, all its GPUs in use.

    Raises:
        HardwareError: no such row, or a figure in it is missing; the text names both.
    """
    row = _row(instance_type)
    try:
        gpu = accelerator(row["gpu"].replace("SXM4", "SXM").replace("SXM5", "SXM"))
    except HardwareError as error:
        raise HardwareError(f"instances.csv, {instance_type}: gpu: {error}") from None
    gpus = int(row["gpus"])
    link = float(row["nvlink_gbps_unidir_per_gpu"] or 0)
    return Machine(
        accelerator=gpu,
        gpus_per_node=gpus,
        # without NVLink the GPUs of a node meet over PCIe
        link_gbytes_per_s=link or _pcie(gpu),
        network_gbit_per_s=_network(row),
    )


def cpu_machine(instance_type: str | None, ranks: int, cores: float, memory_gib: float) -> Machine:
    """A node that runs `ranks` processes on CPU cores. Each process has `cores` cores and `memory_gib` GiB.

    Raises:
        HardwareError: the instance type is given and not in the table.
    """
    cpu = accelerator("CPU")
    share = cores / CPU_CORES
    peaks = {precision: peak * share for precision, peak in cpu.peak_tflops.items()}
    own = replace(cpu, peak_tflops=peaks, memory_gib=memory_gib)
    network = cpu.network_gbit_per_s if instance_type is None else _network(_row(instance_type))
    return Machine(own, ranks, cpu.link_gbytes_per_s, network)


def _pcie(gpu: Accelerator) -> float:
    return gpu.link_gbytes_per_s if gpu.link.startswith("PCIe") else 25.0


def _network(row: Mapping[str, str]) -> float:
    text = (row["network_gbps"] or "").strip()
    if not text:
        raise HardwareError(f"instances.csv, {row['instance']}: network_gbps is missing")
    return float(text)


def _row(instance_type: str) -> Mapping[str, str]:
    row = _table().get(instance_type)
    if row is None:
        raise HardwareError(f"{instance_type!r} has no row in instances.csv: write a listed instance type")
    return row


@cache
def _table() -> Mapping[str, Mapping[str, str]]:
    text = (
        resources.files("cost_aware_operator.costs.tables").joinpath("data/instances.csv").read_text(encoding="utf-8")
    )
    return {row["instance"]: row for row in csv.DictReader(text.splitlines())}
