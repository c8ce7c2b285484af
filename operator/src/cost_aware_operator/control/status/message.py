"""One sentence on what a job is doing. Pure."""

from __future__ import annotations

from cost_aware_operator.control.policy.decision import Decision, Outcome
from cost_aware_operator.control.reading.reading import Reading

UNSEEN = (
    "the program serves no catj_rank_* metrics, so it has no progress, no efficiency and no samples trained exactly once here; "
    "cost_aware_trainer.TrainingSession adds them"
)
"""What a torchrun script that knows nothing of us does without."""


def message_of(reading: Reading, decision: Decision) -> str:
    """The status's message."""
    attempt = decision.record.attempt
    match decision.outcome:
        case Outcome.RUNNING if reading.facts.job.spec.trainer.config is None and not reading.facts.samples:
            return f"attempt {attempt} runs; {UNSEEN}"
        case Outcome.RUNNING:
            return f"attempt {attempt} trains"
        case Outcome.LAUNCHING:
            return f"attempt {attempt}: {decision.message or 'ranks are starting'}"
        case Outcome.SUSPENDED:
            return decision.message or "suspended; set spec.suspend to false to go on from the newest checkpoint"
        case Outcome.BUDGET_EXHAUSTED:
            return "the budget is spent; raise spec.budget.totalUSD to go on from the newest checkpoint"
        case Outcome.FINISHING:
            return "the last step is done; pods are being let go"
        case Outcome.SUCCEEDED:
            return f"all {decision.result.total_steps} steps are done" if decision.result is not None else "done"
    return decision.message
