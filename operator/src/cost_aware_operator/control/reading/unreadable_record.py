"""A stored record that this operator cannot read, and what to say of it."""

from __future__ import annotations

from pydantic import ValidationError

MOST_NAMED = 3
"""Fields that a message names."""
MOST_SHOWN = 300
"""Characters of another error's text that a message shows."""
SUSPENDED_UNTIL_THEN = "Until then the pods save and end, and none is made, as nobody could say what was spent"
UNTIL_THEN = "Until then nothing is done about the job; pods that run go on"


class RecordUnreadableError(ValueError):
    """The stored record is not one that this operator writes; the text names the ConfigMap and says what to do."""

    def __init__(self, config_map: str, error: ValueError, field: str = "record.json") -> None:
        problems = problems_of(error, field) if isinstance(error, ValidationError) else [str(error)[:MOST_SHOWN]]
        why = "; ".join(problems[:MOST_NAMED]) + (
            f"; and {more} more" if (more := len(problems) - MOST_NAMED) > 0 else ""
        )
        super().__init__(
            f"ConfigMap {config_map!r} holds the record of the run and cannot be read: {why}. Upgrade the operator if a newer one "
            "wrote it, or restore what was there before. If the job's record is deleted, the run goes on from its newest checkpoint; "
            f"what was spent stays in its bill. {SUSPENDED_UNTIL_THEN}"
        )


def problems_of(error: ValidationError, field: str) -> list[str]:
    """One problem a field, as a person would write the field's path."""
    said = {"extra_forbidden": "not a field that this operator knows"}
    return [
        f"{'.'.join(map(str, (field, *one['loc'])))}: {said.get(one['type'], one['msg'])}"
        for one in error.errors(include_url=False)
    ]
