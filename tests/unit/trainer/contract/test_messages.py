import dataclasses
import json

import pytest

from cost_aware_trainer import contract
from cost_aware_trainer.contract import (
    ContractError,
    Control,
    OnAllDamaged,
    Reconfiguration,
    RunOrder,
    RunPlan,
    rendezvous_port,
)


def test_an_order_survives_the_wire_unchanged(make_plan):
    order = RunOrder(
        version=1, namespace="n", job="j", attempt=3, nodes=2, ranks_per_node=1, rendezvous_host="h",
        entry=("-m", "cost_aware_trainer"), plan=make_plan(),
    )  # fmt: skip
    assert RunOrder.from_json(order.to_json()) == order


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"attempt": 1}', "Control.stop: missing"),
        ('{"attempt": 1, "stop": true, "more": 1}', "unknown field 'more'"),
        ('{"attempt": "1", "stop": true}', "Control.attempt: expected int"),
        ('{"attempt": true, "stop": true}', "Control.attempt: expected int"),
        ("[]", "expected an object"),
        ("{", "not JSON"),
    ],
)
def test_a_message_that_breaks_the_contract_is_refused_by_field(text, says):
    with pytest.raises(ContractError, match=says):
        Control.from_json(text)


def test_nested_fields_are_named_by_their_path(make_plan):
    text = make_plan().to_json().replace('"hidden": 32', '"hidden": "32"')
    with pytest.raises(ContractError, match=r"RunPlan\.model\.hidden: expected int"):
        RunPlan.from_json(text)


def test_a_control_file_of_an_older_agent_is_read_and_a_new_plan_survives_it(make_plan):
    assert Control.from_json('{"attempt": 1, "stop": true}') == Control(attempt=1, stop=True)
    control = Control(attempt=1, stop=False, reconfigure=Reconfiguration(attempt=2, plan=make_plan()))
    assert Control.from_json(control.to_json()) == control


def test_a_plan_without_a_strategy_is_read_as_before(make_plan):
    document = json.loads(make_plan().to_json())
    del document["strategy"], document["model"]["tied_embeddings"]
    assert RunPlan.from_document(document) == make_plan()


def test_successive_attempts_never_share_a_rendezvous_port():
    assert len({rendezvous_port(attempt) for attempt in range(contract.RENDEZVOUS_PORTS)}) == contract.RENDEZVOUS_PORTS


def test_an_order_in_the_version_before_holds_nothing_that_an_agent_of_it_refuses(make_plan):
    plan = make_plan()
    plan = dataclasses.replace(
        plan, checkpoint=dataclasses.replace(plan.checkpoint, on_all_damaged=OnAllDamaged.RESTART)
    )
    order = RunOrder(
        version=2, namespace="n", job="j", attempt=3, nodes=2, ranks_per_node=1, rendezvous_host="h",
        entry=("x",), plan=plan, job_uid="uid-1",
    )  # fmt: skip
    assert RunOrder.from_json(order.to_json()) == order
    told = json.loads(order.in_version(1).to_json())
    assert told["version"] == 1
    assert "job_uid" not in told
    assert "on_all_damaged" not in told["plan"]["checkpoint"]
    assert not {"rope_theta", "rms_norm_eps"} & told["plan"]["model"].keys()
    assert order.in_version(2) == order == order.in_version(3)


def test_a_model_that_an_older_agent_cannot_train_is_told_to_it_and_so_refused(make_plan):
    plan = make_plan()
    plan = dataclasses.replace(plan, model=dataclasses.replace(plan.model, rope_theta=5e5))
    assert json.loads(plan.to_json())["model"]["rope_theta"] == 5e5
