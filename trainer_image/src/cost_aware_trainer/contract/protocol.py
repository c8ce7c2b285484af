"""What the operator and the trainer agree on: the run plan, the agent's messages, metric names, exit codes.

Nothing but the standard library is imported here, so that the operator can read it without torch and the agent starts
in milliseconds. Every message is JSON, read strictly; see `messages`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cost_aware_trainer.contract.messages import Message
from cost_aware_trainer.contract.run_plan import RunPlan

CONTRACT_VERSION = 1
"""Grows when an older agent could misread a newer operator's order. The agent refuses what it does not know."""

AGENT_PORT = 9300
"""The agent's HTTP port: `GET /status`, `GET /livez`, `POST /order`, `POST /release`."""
METRICS_PORT = 9400
"""Local rank r serves Prometheus metrics at `METRICS_PORT + r`, path `/metrics`."""
RENDEZVOUS_PORT = 29400
"""The first port of torchrun's rendezvous, in the pod of index 0; see `rendezvous_port`."""
RENDEZVOUS_PORTS = 100
"""How many ports the rendezvous of successive attempts cycle through."""
MAX_MESSAGE_BYTES = 256 * 1024
"""No side reads a larger body."""

TOKEN_FILE = "/var/run/secrets/costaware.dev/token"  # noqa: S105  the path of a secret, not a secret
"""Where the per-job token is mounted. The agent reads it at every request, so that it can be rotated."""
RUN_FOLDER = "/run/catj"
"""A writable emptyDir of the pod: plans, control files and results of attempts."""
MEMORY_FOLDER = "/dev/shm/catj"  # noqa: S108  in the pod's own emptyDir, of medium Memory
"""Where ranks keep copies of states that outlive them, and not the pod; see `CheckpointPlan.redundancy`."""

ENV_JOB = "CATJ_JOB"
ENV_NAMESPACE = "CATJ_NAMESPACE"
ENV_POD_INDEX = "JOB_COMPLETION_INDEX"
ENV_ATTEMPT = "CATJ_ATTEMPT"
ENV_CONTROL_FILE = "CATJ_CONTROL_FILE"
ENV_RESULT_FILE = "CATJ_RESULT_FILE"
ENV_RECONFIGURED_FILE = "CATJ_RECONFIGURED_FILE"
ENV_PLAN_FILE = "CATJ_PLAN_FILE"
ENV_METRICS_PORT = "CATJ_METRICS_PORT"
ENV_NODE = "CATJ_NODE"
"""The name of the pod's node, for messages."""
ENV_MEMORY_FOLDER = "CATJ_MEMORY_FOLDER"
ENV_LAUNCH = "CATJ_LAUNCH"
"""A `Launch`, as JSON: how the attempt came to be started."""
ENV_PRELOAD = "CATJ_PRELOAD"
"""Not empty where the pod's orders are going to be for the bundled trainer: then PyTorch is imported before the first."""
ENV_COLD = "CATJ_COLD"
"""Set by a user (`template.env`) where ranks must not be forked: then every process imports PyTorch for itself."""
ENV_POD_UID = "CATJ_POD_UID"
ENV_ENDS_FOLDER = "CATJ_ENDS_FOLDER"
"""Where agents leave word of their own ends; see `PodEnd`."""
ENV_PULSE_FOLDER = "CATJ_PULSE_FOLDER"
"""Set by the agent for the ranks it starts; a rank started by hand has none of them and does without."""

TERMINATION_FILE = "/dev/termination-log"
"""Where an agent leaves the `RunResult` of a complete run; the kubelet's own place."""
MAX_TERMINATION_BYTES = 4096
"""What the kubelet keeps of it."""
ENDED_MARK = "\x1ecatj-launch-ended "
"""Written to standard error by the fork server, with the launch's number, behind all that a launch wrote there; no program writes it
by chance."""
EXIT_STOPPED = 143
"""The agent was told to end (SIGTERM) before the run was complete. Never 0: an Indexed Job
would count the index done."""
EXIT_INVALID = 64
"""The run plan can never work (BSD's EX_USAGE). Retrying is pointless, so nobody does."""


def rendezvous_port(attempt: int) -> int:
    """The rendezvous port of an attempt.

    Each attempt has its own, so that a pod that is early cannot join the store of the attempt that is being
    killed, and a port that is still closing cannot fail the next attempt.
    """
    return RENDEZVOUS_PORT + attempt % RENDEZVOUS_PORTS


class Phase(StrEnum):
    """Where a step's wall time goes. The phases of a step add up to its wall time within 2 %."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    TENSOR_COMMUNICATION = "tensor_communication"
    PIPELINE_COMMUNICATION = "pipeline_communication"
    PIPELINE_BUBBLE = "pipeline_bubble"
    STRAGGLER_WAIT = "straggler_wait"
    """What a rank waits in collectives only because another rank of its pipeline stage was slower."""
    DATA = "data"
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"


class LinkLevel(StrEnum):
    """What a message between two ranks crosses."""

    NODE = "node"
    """Nothing but their host."""
    NETWORK = "network"
    """The network between two hosts."""


class Metric(StrEnum):
    """Per-rank series, each with the labels of `METRIC_LABELS`. Counters count since the rank's process started."""

    STEP = "catj_rank_step"
    TOTAL_STEPS = "catj_rank_total_steps"
    STEPS = "catj_rank_steps_total"
    TOKENS = "catj_rank_tokens_total"
    SAMPLES = "catj_rank_samples_total"
    MODEL_FLOPS = "catj_rank_model_flops_total"
    LOSS = "catj_rank_loss"
    HELDOUT_LOSS = "catj_rank_heldout_loss"
    GRADIENT_NORM = "catj_rank_gradient_norm"
    LEARNING_RATE = "catj_rank_learning_rate"
    PHASE_SECONDS = "catj_rank_phase_seconds_total"
    STEP_SECONDS = "catj_rank_step_seconds_total"
    COMMUNICATION_BYTES = "catj_rank_communication_bytes_total"
    OVERLAPPED_SECONDS = "catj_rank_overlapped_communication_seconds_total"
    MEMORY_BYTES = "catj_rank_memory_bytes"
    CHECKPOINT_STEP = "catj_rank_checkpoint_step"
    RESUMED_STEP = "catj_rank_resumed_step"
    RECONFIGURATIONS = "catj_rank_reconfigurations_total"
    RECONFIGURATION_SECONDS = "catj_rank_reconfiguration_seconds"
    LINK_LATENCY = "catj_rank_link_latency_seconds"
    LINK_BANDWIDTH = "catj_rank_link_bytes_per_second"


METRIC_LABELS = ("namespace", "job", "attempt", "rank")
"""On every series; `PHASE_SECONDS` has `phase` besides, `RECONFIGURATION_SECONDS` has `stage`, and the two of links have `level`."""


class LaunchStage(StrEnum):
    """Where the time goes between an order and the end of the first step under it, in this order."""

    DRAIN = "drain"
    """Until ranks that ran before have reached a step boundary, and, where they end, until they have."""
    SAVE = "save"
    """In process a copy in memory; otherwise the checkpoint that they end with."""
    RELAUNCH = "relaunch"
    """Until the new ranks' processes have imported what they need; not in process."""
    RENDEZVOUS = "rendezvous"
    """Until all ranks have met; in process it is a part of `rebuild`."""
    REBUILD = "rebuild"
    """Groups, mesh, data and model; links are measured where the processes are new."""
    LOAD = "load"
    FIRST_STEP = "first_step"


class AgentPhase(StrEnum):
    """What a pod's agent is doing about the newest attempt it was told of."""

    WAITING = "waiting"
    """No order yet."""
    RUNNING = "running"
    """torchrun runs."""
    COMPLETED = "completed"
    """Every local rank reached the last step; the pod stays for a last scrape until it is released."""
    CHECKPOINTED = "checkpointed"
    """The ranks stopped at a step boundary, as asked, with a checkpoint of it."""
    FAILED = "failed"
    """torchrun ended badly; a new attempt may help."""
    INVALID = "invalid"
    """The plan can never work; `message` says why."""


@dataclass(frozen=True, kw_only=True)
class RunOrder(Message):
    """The operator tells an agent to run one attempt: `torchrun <fixed nnodes, fresh rdzv-id> <entry>`.

    An agent obeys only an attempt greater than the one it knows, so an order may be sent any number of times.
    `plan` is absent for a user's own script; then `entry` alone says what runs. Ranks that run and cannot go on in process have
    `drain_seconds` to reach a step boundary and save, before they are killed; 0 where their peers are gone anyway.
    """

    version: int
    namespace: str
    job: str
    attempt: int
    nodes: int
    ranks_per_node: int
    rendezvous_host: str
    entry: tuple[str, ...]
    plan: RunPlan | None = None
    drain_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Release(Message):
    """The operator lets a pod go: the attempt, and whether the run as a whole is complete.

    With `complete` the agent exits 0, whatever it was doing; it is how a pod that was replaced after the last step
    learns that nothing is left to do.
    """

    attempt: int
    complete: bool


@dataclass(frozen=True, kw_only=True)
class RunResult(Message):
    """What the ranks of one pod left behind when they ended, written by local rank 0.

    `samples_checksum` is an order-free hash over all (position, sample) pairs that made the current weights, carried
    in checkpoints: equal checksums mean that exactly the same samples were trained, none twice and none missing.
    """

    outcome: AgentPhase
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    heldout_loss: float | None = None
    samples: int = 0
    samples_checksum: str = ""
    message: str = ""
    save_seconds: float = field(default=0.0, compare=False)
    """How long ranks that were asked to stop took to save; not a part of what was trained."""


@dataclass(frozen=True, kw_only=True)
class AgentStatus(Message):
    """What `GET /status` answers."""

    version: int
    pod: str
    index: int
    attempt: int
    phase: AgentPhase
    message: str = ""
    result: RunResult | None = None


@dataclass(frozen=True, kw_only=True)
class PodEnd(Message):
    """An agent's last word, kept where the job's other agents can read it: when its pod ended, in seconds of Unix time.

    A pod that is deleted takes its end with it, and nobody may have watched.
    """

    pod_uid: str
    ended_at: float


@dataclass(frozen=True, kw_only=True)
class PodEnds(Message):
    """What `GET /ends` answers: last words of the job's pods, the newest first."""

    ends: tuple[PodEnd, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reconfiguration(Message):
    """A newer attempt for ranks that already run: another plan for the same run on the same ranks."""

    attempt: int
    plan: RunPlan


@dataclass(frozen=True, kw_only=True)
class Launch(Message):
    """What an agent knows of an attempt's start before its ranks run: how long it took to get there.

    `at_seconds` is the clock that all processes of a node share (CLOCK_MONOTONIC). Both durations are 0 where nothing ran.
    """

    at_seconds: float
    drain_seconds: float = 0.0
    save_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Control(Message):
    """What the agent writes into the control file of the running attempt, which the ranks look at between steps.

    `stop`: ranks agree on a step boundary by the flag's maximum over all of them, save a checkpoint of it, and exit 0.
    `reconfigure`: when all of them have seen it they go on under its plan from the next boundary, in the same processes.
    """

    attempt: int
    stop: bool
    reconfigure: Reconfiguration | None = None


@dataclass(frozen=True, kw_only=True)
class Reconfigured(Message):
    """What local rank 0 leaves for the agent when the first step under a new plan has ended; times in seconds.

    `drain` counts from the control file's writing to the step boundary, including a checkpoint that was being written.
    """

    attempt: int
    step: int
    drain_seconds: float
    save_seconds: float
    rebuild_seconds: float
    load_seconds: float
    first_step_seconds: float

    @property
    def total_seconds(self) -> float:
        """From the message to the end of the first step."""
        parts = self.drain_seconds, self.save_seconds, self.rebuild_seconds, self.load_seconds
        return sum(parts) + self.first_step_seconds
