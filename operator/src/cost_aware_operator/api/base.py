"""The base of every API model: frozen, camelCase in YAML, unknown fields refused by name."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


def cel(rule: str, message: str) -> dict[str, str]:
    """One CEL rule of the schema, with the message a user reads when it refuses."""
    return {"rule": rule, "message": message}


def rules(*validations: dict[str, str]) -> dict[str, Any]:
    """CEL rules as an extension of a model's or field's JSON schema."""
    return {"x-kubernetes-validations": list(validations)}


def usd_camel(name: str) -> str:
    """CamelCase with `USD` kept in capitals, as Kubernetes spells abbreviations (`total_usd` becomes `totalUSD`)."""
    camel = to_camel(name)
    return camel[:-3] + "USD" if camel.endswith("Usd") else camel.replace("Gib", "GiB")


class ApiModel(BaseModel):
    """A part of the resource. Constructed by field name, read and written in camelCase."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=usd_camel, populate_by_name=True, use_attribute_docstrings=True
    )

    def to_document(self) -> dict[str, Any]:
        """The YAML form: camelCase, JSON values only, absent fields left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
