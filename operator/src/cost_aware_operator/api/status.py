"""`status` of a CostAwareTrainingJob: what was planned, how far it is, what it cost, and the conditions that explain it."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from cost_aware_operator.api.base import ApiModel

Text = Annotated[str, StringConstraints(max_length=1024)]


class ConditionType(StrEnum):
    """The conditions of a job."""

    PLANNED = "Planned"
    PRICE_KNOWN = "PriceKnown"
    RUNNING = "Running"
    EFFICIENT = "Efficient"
    ADJUSTING = "Adjusting"
    STRAGGLING = "Straggling"
    OBSERVED = "Observed"
    DISRUPTED = "Disrupted"
    SUSPENDED = "Suspended"
    BUDGET_EXHAUSTED = "BudgetExhausted"
    BOOKED = "Booked"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class ConditionStatus(StrEnum):
    """Status of a condition, as Kubernetes has it."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """One condition, as of KEP-1623; no heartbeat time."""

    type: ConditionType
    """What it is about."""
    status: ConditionStatus
    """Whether it holds."""
    reason: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z][A-Za-z0-9]*$")]
    """Why, as one CamelCase word."""
    message: Annotated[str, StringConstraints(max_length=4096)]
    """Why, for a person; where something must be changed, what to write."""
    last_transition_time: datetime
    """When `status` last changed."""
    observed_generation: Annotated[int, Field(ge=0)]
    """The spec's generation that was looked at."""


class JobState(StrEnum):
    """One word for the printed column; derived from the conditions, never read back."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    REJECTED = "Rejected"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class PredictedStatus(ApiModel):
    """What the plan is expected to need."""

    memory_gib: float | None = None
    """Per rank, at its peak."""
    hourly_usd: float | None = None
    """Dollars an hour of all nodes together; absent while the price is unknown."""
    step_seconds: float | None = None
    """Seconds of one optimizer step; absent, like all that follows, if model or hardware is not known."""
    efficiency: float | None = None
    """Share of the ranks' time that moves the weights."""
    hours: float | None = None
    """Hours of the whole run, expected failures included."""
    total_usd: float | None = None
    """Dollars of the whole run; absent while the price is unknown."""


class AlternativeStatus(ApiModel):
    """A plan that was not chosen."""

    degrees: Text
    """Data x tensor x pipeline."""
    nodes: int
    """Pods."""
    instance_type: Text
    """What they would run on."""
    hours: float
    """Hours of the whole run."""
    total_usd: float | None = None
    """Dollars of the whole run; absent while the price is unknown."""
    why_not: Text
    """What it is worse at."""


class MeasuredStatus(ApiModel):
    """What the ranks measure under the plan, and how far the prediction is off; errors are |predicted - measured| / measured."""

    step_seconds: float
    """Seconds of one step on the rank that works longest; like the predicted ones without checkpoints, evaluation and data."""
    step_error: float | None = None
    """Error of the predicted step, as a share of the measured one; absent if none was predicted."""
    memory_gib: float | None = None
    """The largest peak of a rank; on CPUs all that is resident."""
    memory_error: float | None = None
    """Error of the predicted memory, as a share of the measured one."""


class PlanStatus(ApiModel):
    """The degrees in force."""

    data: int
    """Data-parallel degree."""
    tensor: int
    """Tensor-parallel degree."""
    pipeline: int
    """Pipeline-parallel degree."""
    micro_batch: int
    """Samples of one forward pass on one rank."""
    nodes: int
    """Pods."""
    ranks: int
    """Processes."""
    degrees: Text
    """The degrees for the printed column: data x tensor x pipeline."""
    instance_types: Annotated[tuple[Text, ...], Field(max_length=32)] = ()
    """What the pods may run on; empty means any."""
    explanation: Text
    """Why this plan."""
    predicted: PredictedStatus
    """What it is expected to need."""
    measured: MeasuredStatus | None = None
    """What it does need, over the last scrapes; absent until then."""
    alternatives: Annotated[tuple[AlternativeStatus, ...], Field(max_length=5)] = ()
    """The runners-up, best first."""


class ProgressStatus(ApiModel):
    """How far the run is."""

    step: int
    """The last finished optimizer step."""
    total_steps: int
    """The step it ends at."""
    tokens: int
    """Tokens that made the current weights."""
    percent: Annotated[float, Field(ge=0, le=100)]
    """Share of the steps that are done, in percent."""
    loss: float | None = None
    """Training loss of the last step, nats per token."""
    heldout_loss: float | None = None
    """Loss on the held-out split, nats per token."""
    checkpoint_step: int | None = None
    """The step of the newest state that a run would go on from: a complete checkpoint, or what ranks found in their nodes' memory."""
    tokens_per_second: float | None = None
    """Measured over the last scrapes."""
    estimated_remaining_seconds: float | None = None
    """At that speed."""
    samples_checksum: Text | None = None
    """Order-free hash of all samples that made the final weights."""


class EfficiencyStatus(ApiModel):
    """Shares of the ranks' time over the last scrapes; they add up to 1."""

    current: float
    """The share that moves the weights: compute and optimizer."""
    compute: float
    """Forward and backward."""
    communication: float
    """Exposed communication of gradients, waiting for slower ranks included."""
    tensor_communication: float = 0.0
    """Exposed communication of tensor ranks."""
    pipeline_communication: float = 0.0
    """Exposed sends between pipeline stages."""
    pipeline_bubble: float = 0.0
    """Waiting that the pipeline's schedule implies."""
    straggler_wait: float = 0.0
    """Waiting in collectives for a slower rank of the same pipeline stage."""
    data: float
    """Waiting for samples."""
    optimizer: float
    """The optimizer's update."""
    checkpoint: float
    """Blocked by a checkpoint."""
    evaluation: float
    """Held-out evaluation."""
    rank_tokens_per_second: float | None = None
    """Tokens per second of a rank, by the clock."""
    reference_tokens_per_second: float | None = None
    """Tokens per second of a rank that never waits; `current` is the rank's own rate over this one."""
    mfu: float | None = None
    """Operations that the model needs over what the ranks could do at their peak; absent where no peak is listed (CPUs)."""


class CausesStatus(ApiModel):
    """Accrued dollars by what the time went to; they add up to `accruedUSD`."""

    productive: float = 0.0
    """Compute, optimizer and evaluation of steps that count."""
    communication: float = 0.0
    """Exposed communication."""
    checkpoint: float = 0.0
    """Training blocked by checkpoints."""
    restart: float = 0.0
    """Launching and loading."""
    lost_work: float = 0.0
    """Steps that had to be trained again."""
    idle: float = 0.0
    """Pods that neither trained nor restarted: waiting for peers, for data, for their release."""


class GoodputStatus(CausesStatus):
    """Shares of all paid pod-seconds since the start, by the same causes; they add up to 1. All but `productive` is badput."""


class BlocksStatus(ApiModel):
    """Dollars by the four blocks of a run's cost; they add up to `totalUSD`."""

    compute: float = 0.0
    """Arithmetic, pipeline bubbles, and time that nothing else explains."""
    communication: float = 0.0
    """Exposed communication, and bytes between zones."""
    storage: float = 0.0
    """Waiting for data and checkpoints, and what is stored."""
    management: float = 0.0
    """Starts, failures and lost work, and the control plane."""


class SavingsStatus(ApiModel):
    """What the adjuster's changes have saved so far, against a run that was never changed."""

    counterfactual: Text
    """What it is compared with: the submitted plan at the rate that was observed of it, at the prices that were paid since."""
    counterfactual_usd: float
    """What the steps since the first change would have cost."""
    paid_usd: float
    """What they did cost, the changes included."""
    usd: float
    """The difference; negative until the changes have paid for themselves."""


class CostStatus(ApiModel):
    """Dollars so far."""

    accrued_usd: float
    """Pod-seconds x the node's price."""
    spent: Text
    """The dollars as the printed column shows them."""
    by_cause: CausesStatus
    """The dollars by cause."""
    total_usd: float = 0.0
    """`accruedUSD` with transfer, storage and management."""
    by_block: BlocksStatus = BlocksStatus()
    """The dollars by block."""
    savings: SavingsStatus | None = None
    """Dollars that the adjuster saved; absent until it has changed something."""
    storage_usd: float = 0.0
    """List price of the checkpoints that are kept, while pods run, beside `accruedUSD`."""
    management_usd: float = 0.0
    """List price of the control plane, while pods run, beside `accruedUSD`."""
    transfer_usd: float = 0.0
    """Estimated price of bytes sent between zones, beside `accruedUSD`."""
    hourly_usd: float | None = None
    """Dollars an hour of the pods that are up; absent while a price is unknown."""
    projected_usd: float | None = None
    """At the end of the run, at the current speed and price."""
    per_million_tokens_usd: float | None = None
    """Accrued dollars per million tokens trained."""
    pod_seconds: float = 0.0
    """Seconds of all pods together."""
    unpriced_pod_seconds: float = 0.0
    """Those of them that ran on nodes whose price is unknown: they are not in `accruedUSD`."""
    price_source: Text | None = None
    """Source of the price."""
    price_as_of: Text | None = None
    """The day it was true."""


class StagesStatus(ApiModel):
    """Seconds between the agents' being told of a change and the end of the first step under it, by stage."""

    drain: float = 0.0
    """Until the ranks before reached a step boundary, and ended where they do."""
    save: float = 0.0
    """The checkpoint that they ended with, or a copy in memory."""
    relaunch: float = 0.0
    """Until new ranks have imported what they need; 0 where the same processes go on."""
    rendezvous: float = 0.0
    """Until new ranks have met."""
    rebuild: float = 0.0
    """Groups, mesh, data and model."""
    load: float = 0.0
    """The state, from the volume or from memory."""
    first_step: float = 0.0
    """The first step itself."""


class AdjustmentStatus(ApiModel):
    """One change of degrees or nodes: what was promised, and what came of it."""

    time: datetime
    """When it was decided."""
    attempt: int
    """The attempt that carried it out."""
    kind: Text
    """Rebalance (pods stay), Resize, Move (all pods made anew, off a slow node or onto another type) or Shrink (nodes are gone)."""
    from_: Annotated[Text, Field(alias="from")]
    """Data x tensor x pipeline, nodes and micro-batch before."""
    to: Text
    """The plan after it."""
    reason: Text
    """Why, with its numbers."""
    predicted_savings_usd: float
    """Over the rest of the run, its own cost taken off."""
    realised_savings_usd: float | None = None
    """Dollars saved as measured after the change; absent until then."""
    downtime_seconds: float | None = None
    """From the decision to the first step under the new plan."""
    stages: StagesStatus | None = None
    """What the ranks say of that time: pods that come and go, and the operator's looks at them, are beside it."""
    outcome: Text
    """InProgress, Checking, Kept, RolledBack, Failed or Superseded."""


class CheckpointStatus(ApiModel):
    """How often the run is saved."""

    interval_seconds: float
    """Seconds between periodic checkpoints, in force in the newest attempt."""
    reason: Text
    """Why so many."""
    stall_seconds: float | None = None
    """What a save blocks the ranks for, measured; absent before the first."""


class StragglerStatus(ApiModel):
    """A rank that works longer on the same than its peers, over the whole window."""

    rank: int
    """Its number."""
    pod: Text | None = None
    """The plan in force."""
    node: Text | None = None
    """The node under that pod."""
    slowdown: float
    """Times the median of the other ranks of its pipeline stage."""


class JobStatus(ApiModel):
    """All the operator has to say about a job."""

    state: JobState = JobState.PENDING
    """One word for people; programs read the conditions."""
    message: Text = ""
    """One sentence for people: what happens now, or what to change."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """The spec's generation that was looked at."""
    attempt: Annotated[int, Field(ge=0)] = 0
    """How many times the ranks were started; only grows."""
    start_time: datetime | None = None
    """When the first attempt began."""
    completion_time: datetime | None = None
    """When the run succeeded or failed."""
    plan: PlanStatus | None = None
    """The degrees in force."""
    adjustments: Annotated[tuple[AdjustmentStatus, ...], Field(max_length=20)] = ()
    """The newest changes of plan, oldest first."""
    progress: ProgressStatus | None = None
    """How far the run is."""
    efficiency: EfficiencyStatus | None = None
    """Shares of the ranks' time."""
    stragglers: Annotated[tuple[StragglerStatus, ...], Field(max_length=16)] = ()
    """Ranks that hold up the others, the slowest first."""
    checkpoint: CheckpointStatus | None = None
    """How often it is saved; absent for a program of your own."""
    goodput: GoodputStatus | None = None
    """Shares of all paid time by cause."""
    cost: CostStatus | None = None
    """What it cost so far."""
    conditions: Annotated[
        tuple[Condition, ...],
        Field(
            max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
        ),
    ] = ()
    """Why."""
