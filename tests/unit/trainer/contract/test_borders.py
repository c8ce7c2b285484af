"""Whatever JSON comes over the wire either becomes a bounded message or is refused by name: nothing else may happen."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from cost_aware_trainer import contract
from cost_aware_trainer.contract import AgentStatus, ContractError, Message, PodEnds, RunResult
from cost_aware_trainer.contract.messages import MAX_INTEGER, MAX_ITEMS, MAX_TEXT

KINDS = sorted(
    {kind for kind in Message.__subclasses__() if hasattr(contract, kind.__name__)}, key=lambda k: k.__name__
)
STATUS = {"version": 1, "pod": "gpt-0", "index": 0, "attempt": 3, "phase": "running"}
SCALARS = (
    some.none()
    | some.booleans()
    | some.integers()
    | some.integers(-(2**70), 2**70)
    | some.floats()
    | some.text(max_size=20)
)
ANY = some.recursive(SCALARS, lambda inner: some.lists(inner) | some.dictionaries(some.text(max_size=8), inner))


def values_of(message: Any) -> list[Any]:
    """All scalars of a message."""
    if dataclasses.is_dataclass(message):
        return [v for f in dataclasses.fields(message) for v in values_of(getattr(message, f.name))]
    return [v for one in message for v in values_of(one)] if isinstance(message, tuple) else [message]


def assert_bounded(message: Message) -> None:
    for value in values_of(message):
        if isinstance(value, str):
            assert len(value.encode()) <= 4 * MAX_TEXT
        elif isinstance(value, int):
            assert abs(value) <= MAX_INTEGER
        elif value is not None:
            assert math.isfinite(value)
    assert type(message).from_json(message.to_json()) == message, "what was read can be stored, and read again"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=25)
@given(data=some.data())
def test_any_json_is_a_bounded_message_or_refused(kind: type[Message], data: some.DataObject) -> None:
    names = [f.name for f in dataclasses.fields(kind)]
    document = data.draw(ANY | some.fixed_dictionaries({}, optional=dict.fromkeys(names, ANY)))
    try:
        assert_bounded(kind.from_json(json.dumps(document)))
    except ContractError as error:
        why = str(error)
    else:
        return
    assert len(why.encode()) < 4000


@given(some.dictionaries(some.sampled_from([*STATUS, "message", "result"]), ANY, max_size=3))
def test_an_agent_s_answer_with_any_fields_changed_is_bounded_or_refused(changed: dict[str, Any]) -> None:
    try:
        assert_bounded(AgentStatus.from_json(json.dumps({**STATUS, **changed})))
    except ContractError:
        return


@given(some.binary(max_size=200) | some.text(max_size=200))
def test_any_bytes_are_a_message_or_refused(body: bytes | str) -> None:
    try:
        assert_bounded(RunResult.from_json(body))
    except ContractError:
        return


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 200_000, "nested too deeply"),
        ('{"ends": ' * 50_000, "nested too deeply"),
        (json.dumps({**STATUS, "attempt": 2**63}), "AgentStatus.attempt: expected a number of at most"),
        (json.dumps({**STATUS, "attempt": -(2**64)}), "AgentStatus.attempt: expected a number of at most"),
        ('{"outcome": "completed", "loss": NaN}', "not JSON: NaN is not a number"),
        ('{"outcome": "completed", "loss": -Infinity}', "not JSON: -Infinity is not a number"),
        ('{"outcome": "completed", "loss": 1e999}', "RunResult.loss: expected a finite number"),
        ('{"outcome": "completed", "loss": ' + "9" * 400 + "}", "RunResult.loss: expected a number of at most"),
        ('{"outcome": "completed", "step": ' + "9" * 5000 + "}", "not JSON"),
        (json.dumps({**STATUS, "message": "x" * (MAX_TEXT + 1)}), "AgentStatus.message: expected at most 65536 characters"),
        ('{"outcome": "completed", "message": "\\ud800"}', "half of a surrogate pair"),
        (json.dumps({"ends": [{}] * (MAX_ITEMS + 1)}), "PodEnds.ends: expected at most 10000 items"),
    ],
    ids=["deep", "deep-object", "huge", "huge-negative", "nan", "infinity", "overflow", "float", "digits", "long", "half", "many"],
)  # fmt: skip
def test_what_would_wedge_a_reader_is_refused(text: str, says: str) -> None:
    kind = AgentStatus if "AgentStatus" in says else PodEnds if "ends" in says or "nested" in says else RunResult
    with pytest.raises(ContractError, match=says):
        kind.from_json(text)
