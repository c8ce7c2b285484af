"""Generates the CustomResourceDefinition: `python -m cost_aware_operator.api.crd > crds/...yaml`."""

from __future__ import annotations

import sys
from typing import Any

import yaml

from cost_aware_operator.api import GROUP, KIND, PLURAL, VERSION
from cost_aware_operator.api.base import cel
from cost_aware_operator.api.spec import JobSpec
from cost_aware_operator.api.status import JobStatus

_DROPPED = {"title", "additionalProperties", "$defs", "exclusiveMinimum"}


def _column(name: str, kind: str, path: str, description: str, priority: int = 0) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return column | ({"priority": priority} if priority else {})


COLUMNS = [
    _column("State", "string", ".status.state", "What the job does now"),
    _column("Step", "integer", ".status.progress.step", "Finished optimizer steps"),
    _column("Of", "integer", ".status.progress.totalSteps", "Steps of the whole run"),
    _column("Loss", "number", ".status.progress.loss", "Training loss, nats per token"),
    _column("Efficiency", "number", ".status.efficiency.current", "Share of the ranks' time that moves the weights"),
    _column("Spent", "string", ".status.cost.spent", "Dollars accrued"),
    _column("Degrees", "string", ".status.plan.degrees", "Data x tensor x pipeline", 1),
    _column("Nodes", "integer", ".status.plan.nodes", "Pods", 1),
    _column("Attempt", "integer", ".status.attempt", "Starts of the ranks", 1),
    _column("USD/h", "number", ".status.cost.hourlyUSD", "Dollars an hour of the pods that are up", 1),
    _column("Age", "date", ".metadata.creationTimestamp", "Since it was created"),
    _column("Message", "string", ".status.message", "What happens now, or what to change"),
]


def structural(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A pydantic JSON schema as the API server wants it: no references, no unions, no keywords it refuses."""
    if "$ref" in schema:
        target = definitions[schema["$ref"].rsplit("/", 1)[1]]
        schema = target | {k: v for k, v in schema.items() if k != "$ref"}
    if "anyOf" in schema:
        kept = [option for option in schema["anyOf"] if option.get("type") != "null"]
        if len(kept) != 1:
            raise TypeError(f"a union cannot be a structural schema: {schema}")
        rest = {k: v for k, v in schema.items() if k != "anyOf"}
        return structural(kept[0] | rest, definitions)
    result = {k: v for k, v in schema.items() if k not in _DROPPED and not (k == "default" and v is None)}
    if "exclusiveMinimum" in schema:
        # CRDs use OpenAPI 3.0, where this keyword is a flag beside `minimum`
        result |= {"minimum": schema["exclusiveMinimum"], "exclusiveMinimum": True}
    if "prefixItems" in result:
        raise TypeError("tuples of fixed length have no structural schema")
    if "properties" in result:
        result["properties"] = {name: structural(part, definitions) for name, part in result["properties"].items()}
    elif isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = structural(schema["additionalProperties"], definitions)
    if isinstance(result.get("items"), dict):
        result["items"] = structural(result["items"], definitions)
    if result.get("format") == "date-time":
        result.pop("default", None)
    return result


def _schema(model: type[JobSpec] | type[JobStatus], mode: Any) -> dict[str, Any]:
    document = model.model_json_schema(by_alias=True, mode=mode)
    return structural(document, document.get("$defs", {}))


def definition() -> dict[str, Any]:
    """The CustomResourceDefinition as a document."""
    root = {
        "type": "object",
        "description": "A distributed PyTorch training run: planned, launched, measured and priced by cost-aware-training.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _schema(JobSpec, "validation"),
            "status": _schema(JobStatus, "validation"),
        },
        "x-kubernetes-validations": [
            cel(
                "size(self.metadata.name) <= 52",
                "metadata.name must not be longer than 52 characters: pod names are made from it",
            ),
            cel(
                "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "metadata.name must be lower-case letters, digits and '-', and start with a letter: host names are made from it",
            ),
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["catj"],
                "categories": ["all", "training"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": COLUMNS,
                    "schema": {"openAPIV3Schema": root},
                }
            ],
        },
    }


def main() -> None:
    """Prints the definition as YAML."""
    sys.stdout.write("# Generated from cost_aware_operator.api; `make crds` writes it anew.\n")
    yaml.safe_dump(definition(), sys.stdout, sort_keys=False, width=120, allow_unicode=True)


if __name__ == "__main__":
    main()
