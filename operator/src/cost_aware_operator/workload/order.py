"""The order that starts an attempt, from the manifest and the plan."""

from __future__ import annotations

from cost_aware_operator.api.job import TrainingJob
from cost_aware_operator.planning.plan import Plan
from cost_aware_operator.planning.presets import shape_of
from cost_aware_operator.workload.job import DATA_MOUNT
from cost_aware_operator.workload.names import checkpoint_folder, pod_host
from cost_aware_trainer.contract import (
    CONTRACT_VERSION,
    RUN_FOLDER,
    BatchPlan,
    CheckpointPlan,
    Compression,
    DegreesPlan,
    ModelPlan,
    OnAllDamaged,
    OptimizerPlan,
    Precision,
    Recompute,
    Redundancy,
    RunOrder,
    RunPlan,
    Schedule,
    Sharding,
    StrategyPlan,
)

_SHARDINGS = {
    "ddp": Sharding.NONE,
    "zero1": Sharding.ZERO1,
    "zero2": Sharding.ZERO2,
    "zero3": Sharding.ZERO3,
}


DEFAULT_INTERVAL_SECONDS = 60.0


def run_plan(job: TrainingJob, plan: Plan, interval_seconds: float | None = None) -> RunPlan | None:
    """The bundled trainer's run plan, with so many seconds between saves; None for a user's own program."""
    config, model = job.spec.trainer.config, job.spec.model
    if config is None or model is None:
        return None
    shape = shape_of(model)
    compression = Compression(job.spec.communication.compression.value.lower())
    return RunPlan(
        steps=config.steps,
        seed=config.seed,
        model=ModelPlan(
            layers=shape.layers,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            ffn=shape.ffn,
            sequence_length=shape.sequence_length,
            vocabulary=shape.vocabulary,
            tied_embeddings=shape.tied_embeddings,
            rope_theta=model.rope_theta,
            rms_norm_eps=model.rms_norm_eps,
        ),
        degrees=DegreesPlan(data=plan.data, tensor=plan.tensor, pipeline=plan.pipeline),
        strategy=StrategyPlan(
            schedule=Schedule(plan.schedule),
            interleave=plan.interleave,
            # chunks of an interleaved stage are even, and the trainer cuts them itself
            stage_layers=plan.stage_layers if plan.interleave == 1 else (),
            sharding=_SHARDINGS[plan.sharding],
            recompute=Recompute(plan.recompute),
            precision=Precision(plan.precision),
            compile=config.compile,
            compression=compression,
            # what was planned holds for whole gradients
            bucket_mib=plan.bucket_mib if compression is Compression.NONE else None,
        ),
        batch=BatchPlan(global_samples=job.spec.batch.global_, micro_samples=plan.micro_batch),
        optimizer=OptimizerPlan(
            learning_rate=config.learning_rate,
            minimum_learning_rate=config.minimum_learning_rate,
            warmup_steps=config.warmup_steps,
            weight_decay=config.weight_decay,
            gradient_clip=config.gradient_clip,
        ),
        checkpoint=CheckpointPlan(
            folder=checkpoint_folder(job),
            interval_seconds=float(
                interval_seconds or job.spec.checkpoint.interval_seconds or DEFAULT_INTERVAL_SECONDS
            ),
            keep=job.spec.checkpoint.keep,
            redundancy=Redundancy(job.spec.checkpoint.redundancy.value.lower()),
            on_all_damaged=OnAllDamaged(job.spec.checkpoint.on_all_damaged.value.lower()),
        ),
        data_folder=f"{DATA_MOUNT}/{config.data.folder}",
        evaluate_every_steps=config.evaluate_every_steps,
        evaluation_samples=config.evaluation_samples,
    )


DRAIN_SECONDS = 60.0
"""What ranks get to reach a step boundary and save when the number of pods is changed under them."""


def carries_out(job: TrainingJob, order: RunOrder, plan: Plan) -> bool:
    """Whether ranks that follow an order run by a plan. Other buckets alone are no reason to change anything."""
    wanted = run_plan(job, plan)
    if wanted is None or order.plan is None:
        return order.nodes == plan.nodes
    return order.nodes == plan.nodes and order.plan.same_layout_as(wanted)


def run_order(
    job: TrainingJob, plan: Plan, attempt: int, *, drain: bool = False, interval_seconds: float | None = None
) -> RunOrder:
    """What every agent is told; `drain` lets ranks that run save first."""
    trainer = job.spec.trainer
    if trainer.config is not None:
        entry: tuple[str, ...] = (
            "-m",
            "cost_aware_trainer",
            "--plan",
            f"{RUN_FOLDER}/attempt-{attempt}/plan.json",
            "--steps-log",
            f"{checkpoint_folder(job)}/steps.jsonl",
        )
    elif trainer.module is not None:
        entry = ("-m", trainer.module, *(trainer.args or ()))
    else:
        entry = (*(trainer.command or ()), *(trainer.args or ()))
    return RunOrder(
        version=CONTRACT_VERSION,
        namespace=job.key.namespace,
        job=job.key.name,
        attempt=attempt,
        nodes=plan.nodes,
        ranks_per_node=plan.ranks_per_node,
        rendezvous_host=pod_host(job.key, 0),
        entry=entry,
        plan=run_plan(job, plan, interval_seconds),
        drain_seconds=DRAIN_SECONDS if drain else 0.0,
        job_uid=job.uid,
    )
