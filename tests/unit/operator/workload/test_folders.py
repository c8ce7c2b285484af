"""Two jobs never write their checkpoints to one folder at once."""

import dataclasses
from datetime import timedelta

import pytest
from tests.support.factories.facts import condition, decide, facts, job

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.api.status import ConditionType
from cost_aware_operator.control.reading.memory import Memories
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.workload.folders import LivingJob, folder_taken


def named(name, folder="shared", minutes=0.0, volume=None, namespace=None):
    given = job()
    checkpoint = given.spec.checkpoint.model_copy(update={"folder": folder, **({"volume": volume} if volume else {})})
    return dataclasses.replace(
        given,
        key=JobKey(namespace or given.key.namespace, name),
        uid=f"uid-{name}",
        created_at=given.created_at + timedelta(minutes=minutes),
        spec=given.spec.model_copy(update={"checkpoint": checkpoint}),
    )


def test_the_job_that_was_made_later_is_refused_by_the_name_of_the_first():
    first, second = LivingJob(named("a"), False), LivingJob(named("b", minutes=1), False)
    assert folder_taken(first, [first, second]) == ""
    said = folder_taken(second, [first, second])
    assert "'shared'" in said
    assert "job 'a', which has not ended" in said


def test_a_job_that_has_begun_has_the_folder_whoever_was_made_first():
    older, begun = LivingJob(named("a"), False), LivingJob(named("b", minutes=1), True)
    assert "'b'" in folder_taken(older, [older, begun])
    assert folder_taken(begun, [older, begun]) == ""


@pytest.mark.parametrize("folder", ["shared/", "./shared", "x/../shared"])
def test_a_folder_is_the_same_however_it_is_spelled(folder):
    assert folder_taken(LivingJob(named("b", folder, minutes=1), False), [LivingJob(named("a"), False)])


@pytest.mark.parametrize("other", [{"folder": "other"}, {"volume": "other"}, {"namespace": "other"}, {"folder": None}])
def test_other_folders_volumes_and_namespaces_are_nobody_else_s_business(other):
    assert not folder_taken(LivingJob(named("b", minutes=1), False), [LivingJob(named("a", **other), False)])


def test_a_job_that_is_refused_for_its_folder_has_no_pods_and_a_condition_that_says_who_has_it():
    decision = decide(facts(folder_taken="spec.checkpoint.folder: 'x' is the folder of job 'a'"))
    assert not decision.want_pods
    planned = condition(decision, ConditionType.PLANNED)
    assert planned.reason == "FolderInUse"
    assert "job 'a'" in planned.message


def test_a_job_that_has_ended_or_is_gone_holds_no_folder():
    memories = Memories()
    memory = memories.of(named("a").key, "uid-a")
    assert memories.living() == []
    memory.job = named("a")
    assert [one.job.key.name for one in memories.living()] == ["a"]
    memory.saved = RunRecord(attempt=2)
    assert memories.living()[0].has_begun
    memory.saved = RunRecord(attempt=2, ended_at=named("a").created_at)
    assert memories.living() == []
