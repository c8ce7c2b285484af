"""Data of a run, opened by all ranks together."""

from __future__ import annotations

from cost_aware_trainer.contract import RunPlan
from cost_aware_trainer.data.parts import DataError, PassingDataError
from cost_aware_trainer.data.streaming import open_data
from cost_aware_trainer.data.token_files import Corpus
from cost_aware_trainer.distributed.collectives import Ranks
from cost_aware_trainer.distributed.meetings import StorageError
from cost_aware_trainer.state.validation import InvalidRunError


def open_corpus(plan: RunPlan, ranks: Ranks) -> Corpus:
    """Opens the plan's data on every rank. Rank 0 also verifies the hashes.

    Raises:
        InvalidRunError: on all ranks, if any of them cannot use its data folder.
        StorageError: on all ranks, if any of them cannot read it now.
    """
    corpus, problem, meeting = None, "", ranks.meet("data")
    try:
        with ranks.heartbeat.phase("fetch"):
            corpus = open_data(
                plan.data_folder,
                plan.model.sequence_length,
                verify_hashes=ranks.is_first,
                on_bytes=meeting.progressed,
            )
    except DataError as error:
        passing = "storage: " if isinstance(error, PassingDataError) else ""
        problem = f"{passing}data_folder, rank {ranks.rank}: {error}"
    agreed = meeting.agree(problem)
    if agreed.startswith("storage: "):
        raise StorageError(agreed)
    if corpus is None or agreed:
        raise InvalidRunError(agreed)
    return corpus
