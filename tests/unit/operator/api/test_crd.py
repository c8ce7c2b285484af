"""The CustomResourceDefinition is generated from the models, and the example is valid under them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from tests.support import ROOT

from cost_aware_operator.api.crd import definition
from cost_aware_operator.api.spec import JobSpec


def test_the_committed_crd_is_the_generated_one() -> None:
    committed = yaml.safe_load((ROOT / "crds/costaware.dev_costawaretrainingjobs.yaml").read_text())
    assert committed == definition(), "run `make crds`"


def test_the_schema_is_bounded_everywhere_so_that_cel_s_cost_can_be() -> None:
    def unbounded(schema: dict, path: str) -> list[str]:
        found = []
        if schema.get("type") == "array" and "maxItems" not in schema:
            found.append(path)
        for name, part in schema.get("properties", {}).items():
            found += unbounded(part, f"{path}.{name}")
        if isinstance(schema.get("items"), dict):
            found += unbounded(schema["items"], f"{path}[]")
        return found

    schema = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert unbounded(schema["properties"]["spec"], "spec") == []
    assert unbounded(schema["properties"]["status"], "status") == []


def test_every_field_says_what_it_is() -> None:
    def undocumented(schema: dict, path: str) -> list[str]:
        found = []
        for name, part in schema.get("properties", {}).items():
            if not part.get("description"):
                found.append(f"{path}.{name}")
            found += undocumented(part, f"{path}.{name}")
        return found

    schema = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert undocumented(schema["properties"]["spec"], "spec") == []
    assert undocumented(schema["properties"]["status"], "status") == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_examples_are_valid(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        if document["kind"] == "CostAwareTrainingJob":
            JobSpec.model_validate(document["spec"])


def test_an_unknown_field_is_refused_by_name() -> None:
    document = yaml.safe_load((ROOT / "examples/byte-gpt.yaml").read_text())["spec"] | {"gpus": 8}
    with pytest.raises(ValidationError, match="gpus"):
        JobSpec.model_validate(document)
