"""Settings of a pod's agent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cost_aware_trainer.contract import MEMORY_FOLDER, RENDEZVOUS_PORT
from cost_aware_trainer.contract.heartbeat import LIMIT_SECONDS


@dataclass(frozen=True)
class AgentSettings:
    """Settings of an agent, from its command line and its pod."""

    pod: str
    """Name of the pod."""
    index: int
    """Index of the pod in its Indexed Job."""
    run_folder: Path
    """Writable folder for attempts."""
    grace_seconds: float
    """Seconds for the last checkpoint after SIGTERM."""
    linger_seconds: float
    """Seconds to wait for a release after completion."""
    reconfigure_seconds: float = 120.0
    """Seconds that running ranks may take to go on under another plan, including the step that they are in."""
    is_cold: bool = False
    """Whether every launch imports PyTorch again: for measurements, or because ranks must not be forked."""
    preloads: bool = False
    """Whether to import PyTorch before the first order, which will be one for the bundled trainer."""
    memory_folder: Path = Path(MEMORY_FOLDER)
    """Memory-backed folder for copies of the state."""
    node: str = ""
    """Name of the node, for messages; empty if not known, and the pod's name is used."""
    stall_seconds: float = LIMIT_SECONDS
    """Seconds that a rank may show no progress; see `stalls.StallWatch`."""
    rendezvous_port: int | None = None
    """Port for all attempts, in tests on one host; None for a port of each attempt's own."""
    first_rendezvous_port: int = RENDEZVOUS_PORT
    """First of the ports that attempts have of their own."""
