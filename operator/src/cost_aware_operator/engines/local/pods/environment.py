"""The environment of a pod's process, from its container and its place. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cost_aware_operator.engines.local.pods.dealing import Hand
from cost_aware_operator.engines.local.pods.mounts import Mounts
from cost_aware_operator.engines.local.pods.volumes import CannotStartError, Read, entry_of
from cost_aware_operator.workload.views import INDEX_ANNOTATION
from cost_aware_trainer.contract import ENV_ADDRESS, ENV_POD_INDEX, ENV_RENDEZVOUS_PORT

FOREIGN = re.compile(
    r"CATJ_.*|CUDA_VISIBLE_DEVICES|JOB_COMPLETION_INDEX|POD_NAME|POD_IP|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)"
    r"|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*"
)
"""Variables of this host that say something about a run, and so nothing about this one."""
HOST_ADDRESS = "127.0.0.1"
_REFERENCE = re.compile(r"\$\$|\$\((\w+)\)")


def pod_environment(
    pod: Mapping[str, Any], hand: Hand, mounts: Mounts, read: Read, host: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a pod's first container, over that of this host: there is no image to bring one.

    Args:
        pod: its document.
        hand: what was dealt to it.
        mounts: its mounts; paths in its values become the host's.
        read: reads Secrets and ConfigMaps.
        host: this host's environment.

    Raises:
        CannotStartError: a value cannot be had.
    """
    metadata = pod["metadata"]
    own: dict[str, str] = {}
    for entry in pod["spec"]["containers"][0].get("env") or ():
        value = _value(entry, pod, hand, read)
        if value is not None:
            own[entry["name"]] = mounts.text(_expanded(value, own))
    return {
        **{name: value for name, value in host.items() if not FOREIGN.fullmatch(name)},
        # ranks of one host talk to each other over its loopback device
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        **own,
        "HOSTNAME": pod["spec"].get("hostname") or metadata["name"],
        ENV_POD_INDEX: (metadata.get("annotations") or {}).get(INDEX_ANNOTATION, "0"),
        ENV_ADDRESS: hand.address,
        ENV_RENDEZVOUS_PORT: str(hand.rendezvous_port),
        "CUDA_VISIBLE_DEVICES": ",".join(hand.devices),
    }


def _value(entry: Mapping[str, Any], pod: Mapping[str, Any], hand: Hand, read: Read) -> str | None:
    source = entry.get("valueFrom")
    if not source:
        return str(entry.get("value") or "")
    if "fieldRef" in source:
        return _field(source["fieldRef"]["fieldPath"], pod, hand)
    for name, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
        if name in source:
            wanted = source[name]
            document = read(kind, wanted["name"])
            found = entry_of(kind, document, wanted["key"]) if document is not None else None
            if found is None and not wanted.get("optional"):
                raise CannotStartError(f"{entry['name']}: {kind.lower()} {wanted['name']!r} has no {wanted['key']!r}")
            return None if found is None else found.decode()
    raise CannotStartError(f"{entry['name']}: {', '.join(source)} is not to be had on this host")


def _field(path: str, pod: Mapping[str, Any], hand: Hand) -> str:
    """A field of the pod; its status is not written yet."""
    if path in ("status.podIP", "status.podIPs"):
        return hand.address
    if path in ("status.hostIP", "status.hostIPs"):
        return HOST_ADDRESS
    entry = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    if entry:
        return str((pod["metadata"].get(entry[1]) or {}).get(entry[2], ""))
    part, _, name = path.partition(".")
    if part not in ("metadata", "spec") or not isinstance(pod[part].get(name, ""), str):
        raise CannotStartError(f"fieldRef {path!r} is not to be had on this host")
    return str(pod[part].get(name, ""))


def _expanded(value: str, known: Mapping[str, str]) -> str:
    """A value with `$(NAME)` replaced where the name is known; `$$` stands for one sign."""
    return _REFERENCE.sub(lambda f: "$" if f[1] is None else known.get(f[1], f[0]), value)
