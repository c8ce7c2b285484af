"""Kubernetes objects as frozen values, with what the operator reads of them; documents go no further than here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from cost_aware_operator.api import FIELD_OWNER
from cost_aware_operator.workload.job import ANNOTATION_ASKED, ANNOTATION_KEY, ANNOTATION_SECRET, ANNOTATION_TEMPLATE
from cost_aware_operator.workload.names import LABEL_UID
from cost_aware_operator.workload.node_labels import INSTANCE_TYPE_LABELS, ZONE_LABELS, is_spot
from cost_aware_operator.workload.secret import TokenSecret

INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ErrImagePullBackOff")


QUEUE_NAME = "kueue.x-k8s.io/queue-name"
"""The label, of old an annotation, by which a Job is in a queue of Kueue's."""
CORDON = "node.kubernetes.io/unschedulable"
"""The taint of a cordoned node."""


@dataclass(frozen=True)
class PodView:
    """A trainer pod."""

    name: str
    """Its name."""
    uid: str
    """Its uid."""
    index: int
    """Its index in the Job."""
    ip: str | None
    """Its address; None before it has one."""
    node: str | None
    """Its node's name; None before it has one."""
    phase: str
    """Its phase, as Kubernetes writes it."""
    created_at: datetime
    """When it was made."""
    started_at: datetime | None
    """When its container started; None before."""
    ended_at: datetime | None
    """When it ended; None while it may run."""
    deleting: bool
    """Whether it is being deleted."""
    running: bool
    """Whether its container runs."""
    problem: str = ""
    """Why it does not start; empty while nothing is wrong."""
    image_problem: bool = False
    """Whether its image is the problem."""
    exit_code: int | None = None
    """Its container's exit code; None while it runs."""
    priority: int = 0
    """Its priority."""
    scheduled_at: datetime | None = None
    """When it was given its node, by the control plane's clock; None before, or if not told."""
    is_end_watched: bool = False
    """Whether `ended_at` is when its deletion was seen, as its node told no end."""
    owner_uid: str = ""
    """Uid of the Job that made it; empty of a pod that none did."""
    job_uid: str = ""
    """Uid of the training job that pays for it; empty of a pod of before that was written on it."""
    last_message: str = ""
    """What its agent left for the kubelet; see `cost_aware_trainer.contract.TERMINATION_FILE`."""

    @property
    def usable(self) -> bool:
        """Whether its agent may be talked to and given work."""
        return self.running and not self.deleting and self.ip is not None

    @property
    def succeeded(self) -> bool:
        """Whether its agent ended well, after the run was complete."""
        return self.phase == "Succeeded"


@dataclass(frozen=True)
class ChildJobView:
    """The Indexed Job of a training job."""

    uid: str
    """Its uid."""
    suspended: bool
    """Whether it is suspended."""
    template_hash: str
    """Hash of what its pods were made from."""
    deleting: bool
    """Whether it is being deleted."""
    complete: bool
    """Whether the Job controller calls it complete."""
    failure: tuple[str, str] | None
    """Reason and message of a Job that failed; None otherwise."""
    started_at: datetime | None
    """When the Job controller started it."""
    created_at: datetime
    """When it was made."""
    active_deadline_seconds: int | None = None
    """Seconds that its pods may be active; None for no limit."""
    completions: int | None = None
    """Number of its pods."""
    token: TokenSecret | None = None
    """The Secret that its pods mount; None of a Job that was made before each had one of its own."""
    held_by: str = ""
    """Who else has suspended it; empty where nobody has."""


@dataclass(frozen=True)
class Taint:
    """A node's taint."""

    key: str
    """Its key."""
    value: str
    """Its value."""
    effect: str
    """NoSchedule, PreferNoSchedule or NoExecute."""


@dataclass(frozen=True)
class NodeView:
    """A node: its price by its labels, and whether pods may go there."""

    name: str
    """Its name."""
    instance_type: str | None
    """Its instance type; None without a label."""
    zone: str | None
    """Its zone; None without a label."""
    spot: bool
    """Whether it was bought as spot capacity."""
    ready: bool = True
    """Whether it is ready."""
    unschedulable: bool = False
    """Whether its spec forbids new pods."""
    conditions: tuple[str, ...] = ()
    """Names of those that are True."""
    taints: tuple[Taint, ...] = ()
    """Its taints."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Its labels."""
    allocatable: Mapping[str, str] = field(default_factory=dict)
    """What pods may take of it, as Kubernetes quantities."""
    taken: Mapping[str, float] | None = None
    """What other pods take of it, in base units; None where that is not known."""

    @property
    def is_cordoned(self) -> bool:
        """Whether no new pods shall go there: a drain follows most often."""
        return self.unschedulable or any(taint.key == CORDON for taint in self.taints)


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def pod_view(document: Mapping[str, Any]) -> PodView | None:
    """A pod of an Indexed Job; None for a pod without an index, which is none of ours."""
    metadata, status = document["metadata"], document.get("status") or {}
    index = (metadata.get("annotations") or {}).get(INDEX_ANNOTATION)
    if index is None or not index.isdecimal() or len(index) > 9:
        # whoever may edit pods may write anything there
        return None
    containers = status.get("containerStatuses") or []
    state = (containers[0].get("state") or {}) if containers else {}
    terminated, waiting = state.get("terminated") or {}, state.get("waiting") or {}
    phase = status.get("phase", "Pending")
    deletion = _time(metadata.get("deletionTimestamp"))
    ended = _time(terminated.get("finishedAt"))
    if ended is None and phase in ("Succeeded", "Failed"):
        # evicted, or lost with its node: the container never reported its end
        ended = deletion or _condition_time(status, "DisruptionTarget") or _condition_time(status, "Ready")
    return PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        index=int(index),
        ip=status.get("podIP"),
        node=(document.get("spec") or {}).get("nodeName"),
        phase=phase,
        created_at=datetime.fromisoformat(metadata["creationTimestamp"]),
        started_at=_time(status.get("startTime")),
        ended_at=ended,
        deleting=deletion is not None,
        running=bool(state.get("running")),
        problem=_problem(status, waiting, terminated),
        image_problem=waiting.get("reason") in IMAGE_REASONS,
        exit_code=terminated.get("exitCode"),
        priority=(document.get("spec") or {}).get("priority") or 0,
        scheduled_at=_condition_time(status, "PodScheduled") if (document.get("spec") or {}).get("nodeName") else None,
        owner_uid=next((r["uid"] for r in metadata.get("ownerReferences") or () if r.get("controller")), ""),
        job_uid=(metadata.get("labels") or {}).get(LABEL_UID, ""),
        last_message=terminated.get("message") or "",
    )


def _condition_time(status: Mapping[str, Any], kind: str) -> datetime | None:
    for condition in status.get("conditions") or []:
        if condition["type"] == kind:
            return _time(condition.get("lastTransitionTime"))
    return None


def _problem(status: Mapping[str, Any], waiting: Mapping[str, Any], terminated: Mapping[str, Any]) -> str:
    """Why the pod does not run, in the kubelet's and the scheduler's own words."""
    if waiting.get("reason") and waiting["reason"] not in ("ContainerCreating", "PodInitializing"):
        return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    if terminated.get("reason") not in (None, "Completed"):
        return f"{terminated['reason']} (exit code {terminated.get('exitCode')})"
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', 'Unschedulable')}: {condition.get('message', '')}".rstrip(": ")
    return ""


def child_job_view(document: Mapping[str, Any]) -> ChildJobView:
    """The Indexed Job."""
    metadata, status = document["metadata"], document.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or [] if c["status"] == "True"}
    failed = conditions.get("Failed")
    return ChildJobView(
        uid=metadata["uid"],
        suspended=bool(document["spec"].get("suspend")),
        template_hash=(metadata.get("annotations") or {}).get(ANNOTATION_TEMPLATE, ""),
        deleting=metadata.get("deletionTimestamp") is not None,
        complete="Complete" in conditions,
        failure=(failed.get("reason", "JobFailed"), failed.get("message", "")) if failed else None,
        started_at=_time(status.get("startTime")),
        created_at=datetime.fromisoformat(metadata["creationTimestamp"]),
        active_deadline_seconds=document["spec"].get("activeDeadlineSeconds"),
        completions=document["spec"].get("completions"),
        token=_token_secret(metadata.get("annotations") or {}),
        held_by=_held_by(document),
    )


def _token_secret(annotations: Mapping[str, str]) -> TokenSecret | None:
    name, version = annotations.get(ANNOTATION_SECRET), annotations.get(ANNOTATION_KEY, "")
    return TokenSecret(name, int(version)) if name and version.isdecimal() and len(version) < 13 else None


def _held_by(document: Mapping[str, Any]) -> str:
    """Who has suspended a Job that the operator did not ask to be suspended; empty if it was the operator, or nobody."""
    if not document["spec"].get("suspend"):
        return ""
    metadata = document["metadata"]
    annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
    managers = [
        entry
        for entry in metadata.get("managedFields") or []
        if "f:suspend" in ((entry.get("fieldsV1") or {}).get("f:spec") or {}) and entry.get("manager") != FIELD_OWNER
    ]
    asked = annotations.get(ANNOTATION_ASKED)
    # a Job of before this annotation was suspended by the operator, unless somebody else's name is on the field
    if asked == "true" or (asked is None and not managers):
        return ""
    queue = labels.get(QUEUE_NAME) or annotations.get(QUEUE_NAME)
    if queue:
        return f"Kueue (queue {queue!r})"
    newest: Mapping[str, Any] = max(managers, key=lambda entry: str(entry.get("time", "")), default={})
    return f"{newest['manager']!r}" if newest.get("manager") else "another controller"


def node_view(document: Mapping[str, Any]) -> NodeView:
    """A node."""
    labels = document["metadata"].get("labels") or {}
    spec, status = document.get("spec") or {}, document.get("status") or {}
    conditions = {c["type"]: c["status"] for c in status.get("conditions") or []}
    return NodeView(
        name=document["metadata"]["name"],
        instance_type=next((labels[name] for name in INSTANCE_TYPE_LABELS if labels.get(name)), None),
        zone=next((labels[name] for name in ZONE_LABELS if labels.get(name)), None),
        spot=is_spot(labels),
        ready=conditions.get("Ready", "True") == "True",
        unschedulable=bool(spec.get("unschedulable")),
        conditions=tuple(sorted(name for name, status_ in conditions.items() if status_ == "True")),
        taints=tuple(Taint(t["key"], t.get("value") or "", t["effect"]) for t in spec.get("taints") or []),
        labels=labels,
        allocatable=status.get("allocatable") or {},
    )
