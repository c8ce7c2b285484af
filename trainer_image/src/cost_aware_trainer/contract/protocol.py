"""Agreements between operator, agent and ranks: ports, paths, variables, messages, metric names and exit codes.

This module imports nothing but the standard library, so that the operator can read it without torch and the agent
starts in milliseconds. Every message is JSON and is read strictly; see `messages`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from cost_aware_trainer.contract.messages import ADDED_IN_2, Message
from cost_aware_trainer.contract.run_plan import OnAllDamaged, RunPlan

CONTRACT_VERSION = 2
"""Version of the contract. It grows when an older agent could misread a newer operator's order. The agent refuses a version
that it does not know. The operator speaks each agent's own, as `AgentStatus.version` states it, until the agent's pod ends."""

AGENT_PORT = 9300
"""HTTP port of the agent: `GET /status`, `GET /livez`, `POST /order`, `POST /release`."""
METRICS_PORT = 9400
"""Port of local rank 0's Prometheus metrics. Local rank r serves them at `METRICS_PORT + r`, path `/metrics`."""
RENDEZVOUS_PORT = 29400
"""First port of torchrun's rendezvous, in the pod of index 0; see `rendezvous_port`."""
RENDEZVOUS_PORTS = 100
"""Number of ports that the rendezvous of successive attempts cycle through."""
MAX_MESSAGE_BYTES = 256 * 1024
"""Largest body that either side reads."""

TOKEN_FILE = "/var/run/secrets/costaware.dev/token"  # noqa: S105  the path of a secret, not a secret
"""File of the job's token. The agent reads it at every request, so that the token can be rotated."""
RUN_FOLDER = "/run/catj"
"""Writable emptyDir of the pod, for plans, control files and results of attempts."""
MEMORY_FOLDER = "/dev/shm/catj"  # noqa: S108  in the pod's own emptyDir, of medium Memory
"""Folder of copies of the state. They outlive the ranks, but not the pod; see `CheckpointPlan.redundancy`."""

ENV_JOB = "CATJ_JOB"
"""Name of the job."""
ENV_JOB_UID = "CATJ_JOB_UID"
"""Uid of the job, by which its ranks claim the folder of its checkpoints."""
ENV_NAMESPACE = "CATJ_NAMESPACE"
"""Namespace of the job."""
ENV_POD_INDEX = "JOB_COMPLETION_INDEX"
"""Index of the pod in its Indexed Job."""
ENV_ATTEMPT = "CATJ_ATTEMPT"
"""Number of the attempt that a rank was started for."""
ENV_CONTROL_FILE = "CATJ_CONTROL_FILE"
"""File of the attempt's `Control`."""
ENV_RESULT_FILE = "CATJ_RESULT_FILE"
"""File in which local rank 0 leaves a `RunResult`."""
ENV_RECONFIGURED_FILE = "CATJ_RECONFIGURED_FILE"
"""File in which local rank 0 leaves a `Reconfigured`."""
ENV_PULSE_FOLDER = "CATJ_PULSE_FOLDER"
"""Folder of the ranks' heartbeats. The agent sets it, and the files above, for the ranks that it starts; a rank started by hand has
none of them and does without."""
ENV_PLAN_FILE = "CATJ_PLAN_FILE"
"""File of the attempt's `RunPlan`."""
ENV_METRICS_PORT = "CATJ_METRICS_PORT"
"""Port of local rank 0's metrics, in place of `METRICS_PORT`."""
ENV_NODE = "CATJ_NODE"
"""Name of the pod's node, for messages, and by which ranks know which of them share a host."""
ENV_ADDRESS = "CATJ_ADDRESS"
"""The only address that agent and metrics listen on, if several pods share one host; unset, they listen on all."""
ENV_RENDEZVOUS_PORT = "CATJ_RENDEZVOUS_PORT"
"""First port of the job's rendezvous, in place of `RENDEZVOUS_PORT`: torchrun listens on all addresses of a host."""
ENV_MEMORY_FOLDER = "CATJ_MEMORY_FOLDER"
"""Folder of copies of the state in memory, one for each job."""
ENV_LAUNCH = "CATJ_LAUNCH"
"""`Launch` of the attempt, as JSON."""
ENV_PRELOAD = "CATJ_PRELOAD"
"""Any text but an empty one if the pod's orders will be for the bundled trainer: PyTorch is then imported before the first."""
ENV_COLD = "CATJ_COLD"
"""Set by a user (`template.env`) if ranks must not be forked: every process then imports PyTorch for itself."""
ENV_POD_UID = "CATJ_POD_UID"
"""Uid of the pod."""
ENV_ENDS_FOLDER = "CATJ_ENDS_FOLDER"
"""Folder on the volume in which agents write when their pods ended; see `PodEnd`."""

TERMINATION_FILE = "/dev/termination-log"
"""File in which an agent leaves the `RunResult` of a complete run. The kubelet reads termination messages there."""
MAX_TERMINATION_BYTES = 4096
"""Bytes of a termination message that the kubelet keeps."""
ENDED_MARK = "\x1ecatj-launch-ended "
"""Mark that the fork server writes to standard error, with the launch's number, after all that a launch wrote there. No program
writes it by chance."""
EXIT_STOPPED = 143
"""Exit code of an agent that was told to end (SIGTERM) before the run was complete. Never 0: an Indexed Job would count the
index done."""
EXIT_INVALID = 64
"""Exit code of a run whose plan can never work (BSD's EX_USAGE). It is not tried again."""


def rendezvous_port(attempt: int, first: int = RENDEZVOUS_PORT) -> int:
    """Port of an attempt's rendezvous, given the job's first one.

    Each attempt has its own: an early pod cannot join the store of the attempt that is being killed, and a port that
    is still closing cannot fail the next attempt.
    """
    return first + attempt % RENDEZVOUS_PORTS


class Phase(StrEnum):
    """Uses of a step's wall time. The phases of a step add up to its wall time within 2 %."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    TENSOR_COMMUNICATION = "tensor_communication"
    PIPELINE_COMMUNICATION = "pipeline_communication"
    PIPELINE_BUBBLE = "pipeline_bubble"
    STRAGGLER_WAIT = "straggler_wait"
    """Wait in collectives that is only due to a slower rank of the same pipeline stage."""
    DATA = "data"
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"


class LinkLevel(StrEnum):
    """Distance that a message between two ranks crosses."""

    NODE = "node"
    """Both ranks are on one host."""
    NETWORK = "network"
    """The ranks are on two hosts."""


class Metric(StrEnum):
    """Series of one rank, each with the labels of `METRIC_LABELS`. Counters count since the rank's process started."""

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
"""Labels of every series. `PHASE_SECONDS` also has `phase`, `RECONFIGURATION_SECONDS` has `stage`, and both series of links
have `level`."""


class LaunchStage(StrEnum):
    """Stages between an order and the end of the first step under it, in their order."""

    DRAIN = "drain"
    """Lasts until the ranks before have reached a step boundary and, if they end, have ended."""
    SAVE = "save"
    """Makes a copy in memory if the ranks go on in process; otherwise writes the checkpoint that they end with."""
    RELAUNCH = "relaunch"
    """Lasts until the new processes have imported what they need. There is none if the ranks go on in process."""
    RENDEZVOUS = "rendezvous"
    """Lasts until all ranks have met. It is a part of `rebuild` if the ranks go on in process."""
    REBUILD = "rebuild"
    """Builds groups, mesh and model, and opens the data. New processes also measure links."""
    LOAD = "load"
    FIRST_STEP = "first_step"


class AgentPhase(StrEnum):
    """State of a pod's agent, about the newest attempt that it was told of."""

    WAITING = "waiting"
    """No order has come."""
    RUNNING = "running"
    """torchrun runs."""
    COMPLETED = "completed"
    """Every local rank reached the last step. The pod stays for a last scrape until it is released."""
    CHECKPOINTED = "checkpointed"
    """The ranks stopped at a step boundary, as asked, with a checkpoint of it."""
    FAILED = "failed"
    """torchrun ended badly. A new attempt may help."""
    INVALID = "invalid"
    """The plan can never work. `message` says why."""


@dataclass(frozen=True, kw_only=True)
class RunOrder(Message):
    """Order to an agent to run one attempt: `torchrun <fixed nnodes, fresh rdzv-id> <entry>`.

    An agent obeys only an attempt greater than the one it knows, so an order may be sent any number of times.
    """

    version: int
    """Contract version of the sender."""
    namespace: str
    """Namespace of the job."""
    job: str
    """Name of the job."""
    attempt: int
    """Number of the attempt, from 1."""
    nodes: int
    """Pods that take part."""
    ranks_per_node: int
    """Ranks of each pod."""
    rendezvous_host: str
    """Host name of the pod of index 0, where all ranks meet."""
    entry: tuple[str, ...]
    """Arguments of torchrun that name the program and its own arguments."""
    plan: RunPlan | None = None
    """Plan of the bundled trainer; None for a user's own program, for which `entry` alone says what runs."""
    drain_seconds: float = 0.0
    """Seconds that running ranks get to reach a step boundary and save, if they cannot go on in process; then they are killed. 0
    if their peers are gone anyway."""
    job_uid: str = field(default="", metadata=ADDED_IN_2)
    """Uid of the job."""

    def in_version(self, version: int) -> RunOrder:
        """Order as an agent of an older version understands it.

        What it cannot be told it does without, as it always has: the job's uid, and what to do if all checkpoints are damaged. A
        model that it does not know it refuses itself.
        """
        if version >= CONTRACT_VERSION:
            return self
        plan = self.plan
        if plan is not None:
            plan = replace(plan, checkpoint=replace(plan.checkpoint, on_all_damaged=OnAllDamaged.STOP))
        return replace(self, version=version, job_uid="", plan=plan)


@dataclass(frozen=True, kw_only=True)
class Release(Message):
    """Message with which the operator lets a pod go."""

    attempt: int
    """Newest attempt of the run."""
    complete: bool
    """Whether the run is complete. The agent then exits 0, whatever it was doing. A pod that was replaced after the last step
    learns from it that nothing is left to do."""


@dataclass(frozen=True, kw_only=True)
class RunResult(Message):
    """State in which the ranks of one pod ended, written by local rank 0."""

    outcome: AgentPhase
    """Kind of end: completed, checkpointed, failed or invalid."""
    step: int = 0
    """Last completed step."""
    total_steps: int = 0
    """Steps of the whole run."""
    loss: float | None = None
    """Mean training loss of the last step, nats per token."""
    heldout_loss: float | None = None
    """Mean loss of the last held-out evaluation, nats per token."""
    samples: int = 0
    """Samples trained since the start of the run."""
    samples_checksum: str = ""
    """Order-free hash over all (position, sample) pairs that made the current weights, carried in checkpoints. Equal checksums
    mean that exactly the same samples were trained, none twice and none missing."""
    message: str = ""
    """Reason of an end that is not a completion."""
    save_seconds: float = field(default=0.0, compare=False)
    """Seconds that ranks took to save after they were asked to stop. It is not a part of what was trained."""


@dataclass(frozen=True, kw_only=True)
class AgentStatus(Message):
    """Answer to `GET /status`."""

    version: int
    """Contract version of the agent."""
    pod: str
    """Name of the pod."""
    index: int
    """Index of the pod in its Indexed Job."""
    attempt: int
    """Newest attempt that the agent was told of; 0 before the first."""
    phase: AgentPhase
    """State of that attempt on this pod."""
    message: str = ""
    """Reason of a failure, or how the ranks went on."""
    result: RunResult | None = None
    """Result that the ranks left when they ended."""


@dataclass(frozen=True, kw_only=True)
class PodEnd(Message):
    """Time at which a pod ended, written by its agent where the job's other agents can read it.

    A pod that is deleted takes its end with it, and nobody may have watched.
    """

    pod_uid: str
    """Uid of the pod."""
    ended_at: float
    """End of the pod in seconds of Unix time."""


@dataclass(frozen=True, kw_only=True)
class PodEnds(Message):
    """Answer to `GET /ends`."""

    ends: tuple[PodEnd, ...] = ()
    """Ends of the job's pods, the newest first."""


@dataclass(frozen=True, kw_only=True)
class Reconfiguration(Message):
    """Newer attempt for ranks that already run: another plan for the same run on the same ranks."""

    attempt: int
    """Number of the attempt."""
    plan: RunPlan
    """Plan under which the ranks go on."""


@dataclass(frozen=True, kw_only=True)
class Launch(Message):
    """Times that an agent has measured before an attempt's ranks run. Both durations are 0 if nothing ran before."""

    at_seconds: float
    """Moment of the launch, by the clock that all processes of a node share (CLOCK_MONOTONIC)."""
    drain_seconds: float = 0.0
    """Seconds from the order to the launch, without `save_seconds`."""
    save_seconds: float = 0.0
    """Seconds that the ranks before took to save."""


@dataclass(frozen=True, kw_only=True)
class Control(Message):
    """Content of the running attempt's control file, which the agent writes and the ranks look at between steps."""

    attempt: int
    """Newest attempt that the agent was told of."""
    stop: bool
    """Whether to stop. The ranks agree on a step boundary by the flag's maximum over all of them, save a checkpoint of it, and
    exit 0."""
    reconfigure: Reconfiguration | None = None
    """Plan to go on under. When all ranks have seen it, they do so from the next boundary, in the same processes."""


@dataclass(frozen=True, kw_only=True)
class Reconfigured(Message):
    """Message that local rank 0 leaves for the agent when the first step under a new plan has ended."""

    attempt: int
    """Attempt that the ranks went on with."""
    step: int
    """First step under the new plan."""
    drain_seconds: float
    """Seconds from the control file's writing to the step boundary, including a checkpoint that was being written."""
    save_seconds: float
    """Seconds that the copy in memory took."""
    rebuild_seconds: float
    """Seconds that groups, mesh and model took."""
    load_seconds: float
    """Seconds that the exchange of state took."""
    first_step_seconds: float
    """Wall time of the first step, seconds."""

    @property
    def total_seconds(self) -> float:
        """Seconds from the message to the end of the first step."""
        parts = self.drain_seconds, self.save_seconds, self.rebuild_seconds, self.load_seconds
        return sum(parts) + self.first_step_seconds
