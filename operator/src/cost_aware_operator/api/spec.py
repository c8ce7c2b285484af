"""`spec` of a CostAwareTrainingJob. A field is here only if something acts on it.

An absent optional field means "decide for me": the planner fills it and writes its choice into `status.plan`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from cost_aware_operator.api.base import ApiModel, cel, rules
from cost_aware_operator.api.program import Argument, DnsName, TrainerSpec, Word
from cost_aware_operator.api.program import ModelPreset as ModelPreset
from cost_aware_operator.api.program import ModelSpec as ModelSpec


class CapacityType(StrEnum):
    """What the nodes may be bought as."""

    ON_DEMAND = "OnDemand"
    SPOT = "Spot"
    ANY = "Any"


class Objective(StrEnum):
    """What the chosen plan has least of."""

    COST = "Cost"
    TIME = "Time"


class AdjustPolicy(StrEnum):
    """What the operator does where another plan would be cheaper."""

    ACT = "Act"
    RECOMMEND = "Recommend"
    OFF = "Off"


class OnExhausted(StrEnum):
    """What happens when the budget is spent. Both checkpoint first."""

    SUSPEND = "Suspend"
    FAIL = "Fail"


class GradientCompression(StrEnum):
    """How gradients travel between replicas."""

    NONE = "None"
    BF16 = "BF16"
    INT8 = "Int8"
    INT4 = "Int4"


class BatchSpec(ApiModel):
    """The global batch and the sample order never change in a run, whatever the degrees."""

    global_: Annotated[int, Field(ge=1, le=2**24, alias="global")]
    """Samples of one optimizer step."""
    micro: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Samples of one forward pass on one rank; absent means the largest that divides and fits memory."""


Degrees = Annotated[tuple[Annotated[int, Field(ge=1, le=65536)], ...], Field(max_length=32)]


class AllowedDegrees(ApiModel):
    """Values that the planner may choose from; an empty list leaves a degree open."""

    data: Degrees = ()
    """Allowed values of `data`."""
    tensor: Degrees = ()
    """Allowed values of `tensor`."""
    pipeline: Degrees = ()
    """Allowed values of `pipeline`."""


class ParallelismSpec(ApiModel):
    """Degrees at the start; an absent one is planned. Their product is nodes x ranksPerNode.

    Under `efficiency.policy: Act` a run may go on under others, within `allowed`.
    """

    data: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Replicas that each take a share of the global batch."""
    tensor: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Ways a layer is split."""
    pipeline: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Ways the layers are cut into stages."""
    allowed: AllowedDegrees | None = None
    """Bounds of the degrees that are planned."""

    @property
    def product_of_given(self) -> int:
        """The product of the degrees that are written down."""
        return (self.data or 1) * (self.tensor or 1) * (self.pipeline or 1)


class NodesSpec(ApiModel):
    """How many nodes, of what kind. One pod takes a whole node."""

    model_config = ApiModel.model_config | {
        "json_schema_extra": rules(cel("self.min <= self.max", "nodes.min must not be greater than nodes.max"))
    }

    min: Annotated[int, Field(ge=1, le=4096)] = 1
    """The fewest nodes the plan may use."""
    max: Annotated[int, Field(ge=1, le=4096)] = 1
    """The most nodes the plan may use."""
    ranks_per_node: Annotated[int, Field(ge=1, le=64)] | None = None
    """Processes of one pod; absent means one for each GPU that the pod may have (`template.resources.limits`), or one."""
    instance_types: Annotated[tuple[Word, ...], Field(max_length=32)] = ()
    """Instance types that the pods may run on (`node.kubernetes.io/instance-type`); empty means any."""
    capacity_type: CapacityType = CapacityType.ANY
    """On-demand or spot capacity, or either."""


class EfficiencySpec(ApiModel):
    """When the run counts as efficient."""

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.8
    """The condition Efficient is False while less than this share of the ranks' time moves the weights (compute, optimizer)."""
    policy: AdjustPolicy = AdjustPolicy.ACT
    """Act changes degrees and nodes, within their bounds, where that saves more dollars than it costs; Recommend says so only."""
    window_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    """Seconds that are measured under a plan before anything is concluded."""
    cooldown_seconds: Annotated[int, Field(ge=0, le=86400)] = 300
    """Seconds between two changes."""
    minimum_savings_usd: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Dollars that a change must save over the rest of the run, its own cost taken off."""


class BudgetSpec(ApiModel):
    """Dollars the run may cost."""

    model_config = ApiModel.model_config | {
        "json_schema_extra": rules(
            cel("has(self.totalUSD) || has(self.maxHourlyUSD)", "budget: write totalUSD, maxHourlyUSD or both")
        )
    }

    total_usd: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """When this much is accrued, the run checkpoints and stops."""
    max_hourly_usd: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """No plan whose nodes cost more an hour is chosen."""
    on_exhausted: OnExhausted = OnExhausted.SUSPEND
    """Suspend (raise the budget to go on) or Fail."""


class CommunicationSpec(ApiModel):
    """What ranks send to each other."""

    compression: GradientCompression = GradientCompression.NONE
    """How gradients travel between replicas; int8 and int4 in blocks with error feedback. Compression pays on slow links only."""


class CheckpointRedundancy(StrEnum):
    """What nodes keep of each other's states in memory."""

    NONE = "None"
    REPLICA = "Replica"
    PARITY = "Parity"


class OnAllCheckpointsDamaged(StrEnum):
    """What happens where checkpoints are there and none of them is whole. Stop changes nothing, so that they can be looked at."""

    STOP = "Stop"
    RESTART = "Restart"


class CheckpointSpec(ApiModel):
    """Volume, folder and interval of the run's checkpoints."""

    volume: DnsName
    """A ReadWriteMany PersistentVolumeClaim of the job's namespace."""
    folder: Annotated[str, StringConstraints(max_length=253, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]*$")] | None = None
    """The folder in it; absent means one of the job's own. Naming an earlier job's folder continues that run."""
    interval_seconds: Annotated[int, Field(ge=1, le=86400)] | None = None
    """Seconds between periodic checkpoints; absent means those that lose least between saves and failures. In force from the next
    attempt on."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """How many of the newest checkpoints stay. A change is in force from the next attempt on."""
    redundancy: CheckpointRedundancy = CheckpointRedundancy.NONE
    """Also keeps the state in the nodes' memory, every 15 seconds, so that a lost node needs no reading from the volume: Replica in
    that of the next node, Parity as an XOR over several. The bundled trainer only; needs two nodes, and memory for 2 to 4 states."""
    on_all_damaged: OnAllCheckpointsDamaged = OnAllCheckpointsDamaged.STOP
    """If all checkpoints in the folder are damaged: Stop ends the run, and Restart moves them aside and begins at the first step. A
    change is in force from the next attempt on. The bundled trainer only."""


PRESERVE: dict[str, Any] = {"x-kubernetes-preserve-unknown-fields": True}


class TemplateSpec(ApiModel):
    """What the pods are made of, beside what the operator adds. Merged over the operator's own pod defaults."""

    image: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    """The trainer image; absent means the operator's default."""
    image_pull_policy: Annotated[str, StringConstraints(pattern="^(Always|IfNotPresent|Never)$")] | None = None
    """When the image is pulled, as in a container."""
    image_pull_secrets: Annotated[tuple[DnsName, ...], Field(max_length=16)] = ()
    """Names of Secrets for the image's registry."""
    resources: Annotated[dict[str, Any] | None, Field(json_schema_extra=PRESERVE)] = None
    """Requests and limits of the trainer container; the memory limit bounds the plan."""
    env: Annotated[
        tuple[dict[str, Any], ...], Field(max_length=256, json_schema_extra={"items": {"type": "object"} | PRESERVE})
    ] = ()
    """Further environment variables (EnvVar)."""
    volumes: Annotated[
        tuple[dict[str, Any], ...], Field(max_length=64, json_schema_extra={"items": {"type": "object"} | PRESERVE})
    ] = ()
    """Further volumes (Volume)."""
    volume_mounts: Annotated[
        tuple[dict[str, Any], ...], Field(max_length=64, json_schema_extra={"items": {"type": "object"} | PRESERVE})
    ] = ()
    """Further mounts (VolumeMount)."""
    node_selector: Annotated[dict[str, Word], Field(max_length=64)] = Field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: Annotated[
        tuple[dict[str, Any], ...], Field(max_length=64, json_schema_extra={"items": {"type": "object"} | PRESERVE})
    ] = ()
    """Tolerations (Toleration)."""
    labels: Annotated[dict[str, Annotated[str, StringConstraints(max_length=63)]], Field(max_length=64)] = Field(
        default_factory=dict
    )
    """Labels of the Job and its pods, a queue's name for example."""
    annotations: Annotated[dict[str, Argument], Field(max_length=64)] = Field(default_factory=dict)
    """Annotations of the pods."""
    priority_class_name: DnsName | None = None
    """The pods' PriorityClass."""


def _immutable(field: str) -> dict[str, str]:
    """A part that makes the run what it is: its checkpoints would mean nothing under another one."""
    return cel(
        f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})",
        f"spec.{field} cannot change: the run's checkpoints belong to it; create another job instead",
    )


def _while_running(field: str) -> dict[str, str]:
    return cel(
        f"(has(self.suspend) && self.suspend && has(oldSelf.suspend) && oldSelf.suspend) ||"
        f" (has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field}))",
        f"spec.{field} cannot change while the job runs: set spec.suspend to true first, then change it, then resume",
    )


class JobSpec(ApiModel):
    """The manifest of a training run."""

    model_config = ApiModel.model_config | {
        "json_schema_extra": rules(
            cel(
                "!has(self.trainer.config) || has(self.model)",
                "spec.model is needed by the bundled trainer: write a preset or the shape",
            ),
            cel(
                "!has(self.parallelism) || !has(self.parallelism.data)"
                " || self.batch.global % (self.parallelism.data * (has(self.batch.micro) ? self.batch.micro : 1)) == 0",
                "batch.global must be divisible by parallelism.data x batch.micro: change one of the three so that it is",
            ),
            cel(
                "!has(self.parallelism) || !has(self.parallelism.data) || !has(self.nodes.ranksPerNode)"
                " || !(has(self.parallelism.tensor) && has(self.parallelism.pipeline))"
                " || (self.parallelism.data * self.parallelism.tensor * self.parallelism.pipeline"
                " >= self.nodes.min * self.nodes.ranksPerNode"
                " && self.parallelism.data * self.parallelism.tensor * self.parallelism.pipeline"
                " <= self.nodes.max * self.nodes.ranksPerNode"
                " && self.parallelism.data * self.parallelism.tensor * self.parallelism.pipeline"
                " % self.nodes.ranksPerNode == 0)",
                "parallelism: the product of the degrees must be nodes x nodes.ranksPerNode for a node count between"
                " nodes.min and nodes.max: change the degrees or the nodes",
            ),
            cel(
                "!has(self.checkpoint.redundancy) || self.checkpoint.redundancy == 'None' || self.nodes.max >= 2",
                "checkpoint.redundancy keeps copies on other nodes: write nodes.max: 2 or more, or leave it out",
            ),
            _immutable("model"),
            _immutable("trainer"),
            cel(
                "self.checkpoint.volume == oldSelf.checkpoint.volume"
                " && has(self.checkpoint.folder) == has(oldSelf.checkpoint.folder)"
                " && (!has(self.checkpoint.folder) || self.checkpoint.folder == oldSelf.checkpoint.folder)",
                "spec.checkpoint.volume and folder cannot change: the run's checkpoints lie there; create another job instead",
            ),
            cel(
                "self.batch.global == oldSelf.batch.global",
                "spec.batch.global cannot change: the run's samples and schedule belong to it; create another job instead",
            ),
            cel(
                "has(self.managedBy) == has(oldSelf.managedBy) && (!has(self.managedBy) || self.managedBy == oldSelf.managedBy)",
                "spec.managedBy cannot change",
            ),
            _while_running("parallelism"),
            _while_running("nodes"),
            _while_running("batch"),
            _while_running("communication"),
            _while_running("template"),
        )
    }

    suspend: bool = False
    """True checkpoints the run and removes its pods; false goes on from that checkpoint."""
    managed_by: Annotated[str, StringConstraints(max_length=63)] | None = None
    """Who reconciles this job; absent or `costaware.dev/operator` means this operator."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Seconds after which a finished job is deleted; absent means never."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Seconds that the pods may be active; then the job fails. The clock restarts on resume, as it does for a Job."""
    startup_deadline_seconds: Annotated[int, Field(ge=1, le=86400)] = 600
    """Seconds that the first pods may take to start (image, scheduling); then the job fails."""
    trainer: TrainerSpec
    """What runs."""
    model: ModelSpec | None = None
    """The model's shape: memory and cost are predicted from it."""
    batch: BatchSpec
    """Samples of a step."""
    parallelism: ParallelismSpec | None = None
    """Degrees; absent means planned."""
    objective: Objective = Objective.COST
    """What is least in the chosen plan, of all that meet every bound: dollars (Cost) or time (Time)."""
    deadline_seconds: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Seconds that the whole run may take as predicted; a plan that would take longer is not chosen."""
    nodes: NodesSpec = Field(default_factory=NodesSpec, json_schema_extra={"default": NodesSpec().to_document()})
    """Nodes that it may run on."""
    efficiency: EfficiencySpec = Field(
        default_factory=EfficiencySpec, json_schema_extra={"default": EfficiencySpec().to_document()}
    )
    """When it counts as efficient."""
    budget: BudgetSpec | None = None
    """What it may cost."""
    checkpoint: CheckpointSpec
    """How it is saved."""
    communication: CommunicationSpec = Field(
        default_factory=CommunicationSpec, json_schema_extra={"default": CommunicationSpec().to_document()}
    )
    """What its ranks send."""
    template: TemplateSpec = Field(default_factory=TemplateSpec)
    """What the pods are made of."""
