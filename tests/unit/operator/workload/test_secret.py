"""Tokens: each Secret's own, derived again without reading it, and known for as long as pods live that have them."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest
from tests.support.factories.facts import job

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.workload.secret import KeyRing, TokenSecret, secret, secret_name


def ring(**keys: str) -> KeyRing:
    data = {name.replace("_", "-"): base64.b64encode(key.encode() * 16).decode() for name, key in keys.items()}
    return KeyRing.of({**data, "something-else": "!"})


JOB = job()
OTHER = replace(JOB, uid="another")
NAMED = TokenSecret("catj-uid-1", 1)


def test_a_token_belongs_to_one_secret_of_one_job_and_one_key() -> None:
    tokens = [
        ring(key="a").token(JOB, NAMED),
        ring(key="a").token(JOB, replace(NAMED, name="catj-uid-2")),
        ring(key="a").token(OTHER, NAMED),
        ring(key="b").token(JOB, NAMED),
        ring(key="a").token(JOB, None),
        ring(key="a").token(OTHER, None),
        ring(key="a").token(replace(JOB, key=JobKey("t", "gpt")), None),
    ]
    assert len(set(tokens)) == len(tokens)
    assert tokens[0] == ring(key="a").token(JOB, NAMED)


def test_a_job_named_github_has_no_secret_named_github_token() -> None:
    github = replace(JOB, key=JobKey("team", "github"))
    document = secret(github, secret_name(github, "5eed5eed"), "text")
    assert document["metadata"]["name"] == f"catj-{github.uid}-5eed5eed"
    assert document["immutable"] is True


def test_pods_keep_the_token_of_their_key_when_a_newer_one_comes() -> None:
    before, after = ring(key="a"), ring(key="a", key_2="b")
    assert (before.newest, after.newest) == (1, 2)
    assert after.token(JOB, NAMED) == before.token(JOB, NAMED)
    assert after.token(JOB, None) == before.token(JOB, None), "pods made before each Job had a Secret of its own"
    assert after.token(JOB, replace(NAMED, key_version=2)) not in (None, before.token(JOB, NAMED))
    assert ring(key_2="b").token(JOB, NAMED) is None, "its key is gone"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({}, "there is no entry 'key'"),
        ({"key": "*"}, "key: not base64"),
        ({"key-2": "YQ=="}, "key-2: shorter than 16 bytes"),
    ],
)
def test_a_key_that_cannot_be_used_is_named(data: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        KeyRing.of(data)
