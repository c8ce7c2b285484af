"""Files that the agent writes for one attempt's ranks, and the environment that names them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from cost_aware_trainer.contract import (
    ENV_ATTEMPT,
    ENV_CONTROL_FILE,
    ENV_JOB,
    ENV_JOB_UID,
    ENV_LAUNCH,
    ENV_MEMORY_FOLDER,
    ENV_NAMESPACE,
    ENV_PLAN_FILE,
    ENV_PULSE_FOLDER,
    ENV_RECONFIGURED_FILE,
    ENV_RESULT_FILE,
    Control,
    Launch,
    RunOrder,
)
from cost_aware_trainer.contract.rank_environment import write_atomically

DEFAULT_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # CUDA memory grows in place: micro-batches and layouts of other sizes leave no holes that nothing fits into
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # a rank whose collective fails ends at once with its reason, so that the agent can name it
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
"""Variables of ranks, unless the pod sets them otherwise."""
PULSES = "pulses"
"""Folder of the ranks' heartbeats, inside the attempt's folder."""


def write_attempt(
    order: RunOrder, folder: Path, memory: Path, launch: Launch, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Writes the attempt's files and returns the ranks' environment, which names them.

    Args:
        order: the attempt's order.
        folder: the attempt's own folder; what it held before is removed.
        memory: a memory-backed folder that outlives attempts.
        launch: times measured before the ranks run.
        inherited: the agent's environment, which the ranks inherit.
    """
    # A container that was restarted finds its predecessor's files, and must not take an old result for a new one.
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("tmp", PULSES):
        (folder / name).mkdir(parents=True)
    write_atomically(folder / "control.json", Control(attempt=order.attempt, stop=False).to_json())
    environment = {
        # torchrun needs a writable temporary folder; the root file system may be read-only.
        "TMPDIR": str(folder / "tmp"),
        **DEFAULT_ENVIRONMENT,
        **inherited,
        ENV_JOB: order.job,
        ENV_JOB_UID: order.job_uid,
        ENV_NAMESPACE: order.namespace,
        ENV_ATTEMPT: str(order.attempt),
        ENV_CONTROL_FILE: str(folder / "control.json"),
        ENV_RESULT_FILE: str(folder / "result.json"),
        ENV_RECONFIGURED_FILE: str(folder / "reconfigured.json"),
        ENV_PULSE_FOLDER: str(folder / PULSES),
        ENV_LAUNCH: launch.to_json(),
        ENV_MEMORY_FOLDER: str(memory / f"{order.namespace}-{order.job}"),
    }
    if order.plan is not None:
        write_atomically(folder / "plan.json", order.plan.to_json())
        environment[ENV_PLAN_FILE] = str(folder / "plan.json")
    return environment
