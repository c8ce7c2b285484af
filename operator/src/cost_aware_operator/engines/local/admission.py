"""Rules that a store asks before every call: refusals, and acts that come in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cost_aware_operator.engines.cluster import ApiError
from cost_aware_operator.engines.local.store import Request


@dataclass
class _Rule:
    """A rule of a test or a policy: what happens to a kind of call."""

    verb: str
    """The call's verb."""
    kind: str
    """The object's kind."""
    act: Callable[[Request], None]
    """What is done before the call; it may raise."""
    times: int | None
    """How often it holds; None for always."""

    def concerns(self, request: Request) -> bool:
        return self.times != 0 and request.verb == self.verb and request.key.kind == self.kind


class Rules:
    """Rules by verb and kind, each for so many calls, or for all of them; in the order in which they were made."""

    def __init__(self) -> None:
        self._rules: list[_Rule] = []

    def refuse(self, verb: str, kind: str, error: ApiError, times: int | None = None) -> None:
        """Refuses calls, as a quota, a policy or a server that is away would."""

        def act(_: Request) -> None:
            raise error

        self._rules.append(_Rule(verb, kind, act, times))

    def before(self, verb: str, kind: str, act: Callable[[Request], None], times: int | None = 1) -> None:
        """Does something before calls go on; the store may be written to meanwhile."""
        self._rules.append(_Rule(verb, kind, act, times))

    def admit(self, request: Request) -> None:
        """Raises ApiError where a rule refuses the call."""
        for rule in self._rules:
            if rule.concerns(request):
                if rule.times is not None:
                    rule.times -= 1
                rule.act(request)
