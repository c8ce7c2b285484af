"""Mesh of a run: its ranks on three axes, with a process group along each axis that is longer than one."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cost_aware_trainer.contract import RunPlan
from cost_aware_trainer.distributed.collectives import TIMEOUT, Ranks
from cost_aware_trainer.distributed.layout import Coordinates, pipeline_rank_of, stage_count
from cost_aware_trainer.telemetry.traffic import Axis, Traffic


@dataclass(frozen=True)
class Mesh:
    """Place of this rank, and its groups along the axes."""

    ranks: Ranks
    """All ranks of the run."""
    place: Coordinates
    """Place of this rank on the axes."""
    groups: dict[Axis, dist.ProcessGroup]
    """Group of this rank's peers along each axis; an axis of length one has none."""
    lengths: dict[Axis, int]
    """Number of ranks along each axis."""
    data: DeviceMesh | None
    """Data axis as fully_shard wants it; None if its length is one."""
    ends: dist.ProcessGroup | None
    """Group of the ranks that hold the two copies of a tied embedding, if this is one of them."""
    traffic: Traffic
    """Counter of this rank's bytes and waits."""

    def group(self, axis: Axis) -> dist.ProcessGroup | None:
        """Group of this rank's peers along an axis; None if there are none."""
        return self.groups.get(axis)


def build_mesh(ranks: Ranks, plan: RunPlan) -> Mesh:
    """Makes the groups of a plan's degrees. Every rank of the run must call it."""
    degrees = plan.degrees
    lengths = {Axis.PIPELINE: degrees.pipeline, Axis.DATA: degrees.data, Axis.TENSOR: degrees.tensor}
    long = {axis: length for axis, length in lengths.items() if length > 1}
    groups: dict[Axis, dist.ProcessGroup] = {}
    data: DeviceMesh | None = None
    if long:
        names = tuple(axis.value for axis in long)
        mesh = init_device_mesh(ranks.device.type, tuple(long.values()), mesh_dim_names=names)
        groups = {axis: mesh.get_group(axis.value) for axis in long}
        data = mesh[Axis.DATA.value] if Axis.DATA in long else None
    place = Coordinates.of(ranks.rank, degrees)
    return Mesh(ranks, place, groups, lengths, data, _ends_group(ranks, plan), Traffic(ranks.device, ranks.heartbeat))


def _ends_group(ranks: Ranks, plan: RunPlan) -> dist.ProcessGroup | None:
    """Makes the groups of both ends of a pipeline whose embedding is tied; returns this rank's, if it is at an end."""
    first, last = pipeline_rank_of(0, plan), pipeline_rank_of(stage_count(plan) - 1, plan)
    if not plan.model.tied_embeddings or first == last:
        return None
    mine: dist.ProcessGroup | None = None
    for data in range(plan.degrees.data):
        for tensor in range(plan.degrees.tensor):
            members = [Coordinates(data, tensor, end).rank(plan.degrees) for end in (first, last)]
            # Every rank takes part in making every group.
            group = dist.new_group(members, timeout=TIMEOUT)
            if ranks.rank in members:
                assert isinstance(group, dist.ProcessGroup)  # noqa: S101  it is a member
                mine = group
    return mine


def data_mesh(ranks: Ranks) -> Mesh:
    """Makes the mesh of a session: all ranks on the data axis, in a group of their own.

    A user's module may have collectives of its own, SyncBatchNorm for example. In one group they would meet a gradient's sum
    where ranks are not equally far.
    """
    group = dist.new_group(timeout=TIMEOUT) if ranks.size > 1 else None
    groups = {Axis.DATA: group} if isinstance(group, dist.ProcessGroup) else {}
    lengths = {Axis.PIPELINE: 1, Axis.DATA: ranks.size, Axis.TENSOR: 1}
    return Mesh(
        ranks, Coordinates(ranks.rank, 0, 0), groups, lengths, None, None, Traffic(ranks.device, ranks.heartbeat)
    )
