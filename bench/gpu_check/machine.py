"""The machine: what its GPUs are and which row of the hardware table is theirs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from cost_aware_operator.costs.tables.hardware import Accelerator, accelerators

GIB = 2.0**30
NEAR = 0.15
"""Share by which a GPU's memory may differ from its row's: drivers keep some, and tables round."""
OTHER_FORMS = re.compile(r"PCI|NVL\b|Max-Q|MIG", re.IGNORECASE)
"""Words in the name of a GPU whose peak is not that of its namesake on an SXM board."""


def facts() -> dict[str, Any]:
    """What torch sees. It touches the device, so it runs in a process of its own."""
    count = torch.cuda.device_count()
    found: dict[str, Any] = {"gpu_count": count, "gpu_name": None, "gpu_memory_gib": None, "nccl_version": None}
    found |= {"torch_version": torch.__version__, "cuda_version": torch.version.cuda}
    if count:
        found["gpu_name"] = torch.cuda.get_device_name(0)
        found["gpu_memory_gib"] = torch.cuda.get_device_properties(0).total_memory / GIB
        found["gpu_names"] = [torch.cuda.get_device_name(index) for index in range(count)]
        found["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def outer_facts() -> dict[str, Any]:
    """What is known without torch: the driver, and the commit of the sources."""
    root = Path(__file__).resolve().parents[2]
    has_driver = shutil.which("nvidia-smi") is not None
    driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if has_driver else None
    return {
        "driver_version": driver.splitlines()[0] if driver else None,
        "commit": _said("git", "-C", str(root), "rev-parse", "HEAD"),
        "has_local_changes": bool(_said("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")),
    }


def _said(*command: str) -> str | None:
    """What a command prints; None if it cannot be run, as git where the sources are no clone."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def row_of(gpu_name: str, memory_gib: float) -> Accelerator | None:
    """Row of accelerators.csv for a GPU as its driver names it; None if there is none that is surely its own.

    `NVIDIA A100-SXM4-80GB` is A100-SXM-80GB: the words before the first dash are in its name, and the memory is near.
    """
    words = set(re.findall(r"[a-z0-9]+", gpu_name.lower()))
    found = [
        row
        for row in accelerators().values()
        if row.generation != "cpu"
        and set(_model_of(row.name)) <= words
        and not ("SXM" in row.name and OTHER_FORMS.search(gpu_name))
        and abs(memory_gib / row.memory_gib - 1) <= NEAR
    ]
    return min(found, key=lambda row: abs(memory_gib - row.memory_gib), default=None)


def _model_of(row_name: str) -> list[str]:
    """Words that make the model's name: all before the board and the memory, such as `rtx` and `3090`."""
    words = re.findall(r"[a-z0-9]+", row_name.lower())
    return [word for word in words if not word.startswith("sxm") and not re.fullmatch(r"\d+gb", word)]
