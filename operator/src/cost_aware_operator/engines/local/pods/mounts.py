"""Container paths as paths of this host. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cost_aware_trainer.contract import RunOrder

HOST_S_OWN = frozenset({"/tmp", "/dev/shm"})  # noqa: S108  names of mounts
"""Mounts that every host has too. A text that names them is left alone: a program that has them in its own code gets the host's."""


@dataclass(frozen=True)
class Mounts:
    """A pod's mounts, and the folders of this host that stand for them."""

    folders: Mapping[str, str]
    """Absolute folders of this host by the absolute path in the container; neither ends with a slash."""

    def path(self, path: str) -> str:
        """The host's path for a path in the container; a path under no mount stays as it is. The longest mount counts."""
        for mount in self._longest_first():
            if path == mount or path.startswith(mount + "/"):
                return self.folders[mount] + path[len(mount) :]
        return path

    def text(self, text: str) -> str:
        """A text in which every path under a mount is the host's: an argument, or a variable's value with several paths."""
        mounts = [mount for mount in self._longest_first() if mount not in HOST_S_OWN]
        if not mounts:
            return text
        # a path begins after something that no path goes on after, and its first parts end where a part may end
        pattern = rf"(?<![\w./~-])(?:{'|'.join(map(re.escape, mounts))})(?![\w.~-])"
        return re.sub(pattern, lambda found: self.folders[found[0]], text)

    def _longest_first(self) -> list[str]:
        return sorted(self.folders, key=lambda mount: (-len(mount), mount))


def localised(order: RunOrder, mounts: Mounts, rendezvous_host: str | None = None) -> RunOrder:
    """The order as one pod's agent on this host can follow it: paths are the host's, and ranks meet at an address.

    Args:
        order: the order that all pods get.
        mounts: the pod's own mounts.
        rendezvous_host: the address of the pod of index 0; None leaves the order's name.
    """
    plan = order.plan
    if plan is not None:
        checkpoint = replace(plan.checkpoint, folder=mounts.text(plan.checkpoint.folder))
        plan = replace(plan, checkpoint=checkpoint, data_folder=mounts.text(plan.data_folder))
    entry = tuple(mounts.text(argument) for argument in order.entry)
    return replace(order, plan=plan, entry=entry, rendezvous_host=rendezvous_host or order.rendezvous_host)
