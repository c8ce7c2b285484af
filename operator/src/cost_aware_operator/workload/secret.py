"""The Secret with the agents' token, and how tokens follow from the operator's keys. Pure.

The operator never reads a job's Secret: it derives the token again from its own key, whose version the record and the Job name.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cost_aware_operator.api.job import TrainingJob
from cost_aware_operator.workload.names import child_metadata

FIRST_KEY = "key"
"""The entry of the first key in the operator's own Secret, of version 1; others are `key-` and a greater number, a time."""
_LATER_KEY = re.compile(r"key-([1-9][0-9]{0,11})")


@dataclass(frozen=True)
class TokenSecret:
    """A Secret with a job's token: one for each time that its pods' Job is made."""

    name: str
    """Its name."""
    key_version: int
    """Version of the operator's key that the token is derived from."""


@dataclass(frozen=True)
class KeyRing:
    """The operator's keys. New tokens are made from the newest; those of pods that live stay known while their key is here."""

    keys: Mapping[int, bytes]
    """Keys by version; at least one."""

    @classmethod
    def of(cls, data: Mapping[str, str]) -> KeyRing:
        """The keys in a Secret's data.

        Raises:
            ValueError: there is none, or one is not base64 of at least 16 bytes.
        """
        keys: dict[int, bytes] = {}
        for name, text in data.items():
            later = _LATER_KEY.fullmatch(name)
            if name == FIRST_KEY or later is not None:
                try:
                    key = base64.b64decode(text, validate=True)
                except binascii.Error as error:
                    raise ValueError(f"{name}: not base64: write the output of `openssl rand -base64 32`") from error
                if len(key) < 16:
                    raise ValueError(f"{name}: shorter than 16 bytes: write the output of `openssl rand -base64 32`")
                keys[int(later.group(1)) if later is not None else 1] = key
        if not keys:
            raise ValueError(f"there is no entry {FIRST_KEY!r}: delete the Secret to have one made")
        return cls(keys)

    @staticmethod
    def entry(made_at: datetime) -> str:
        """The entry of a key that is made now: if the one before was lost, nobody shall take this one for it."""
        return f"{FIRST_KEY}-{int(made_at.timestamp())}"

    @property
    def newest(self) -> int:
        """Version of the newest key."""
        return max(self.keys)

    @property
    def versions(self) -> frozenset[int]:
        """Versions of all keys."""
        return frozenset(self.keys)

    def token(self, job: TrainingJob, found: TokenSecret | None) -> str | None:
        """The token in a job's Secret; None where its key is gone.

        Without a Secret's name it is the token of a Job that was made before each had a Secret of its own.
        """
        key = self.keys.get(found.key_version if found is not None else 1)
        about = f"{job.uid}/{found.name}" if found is not None else f"{job.key}:{job.uid}"
        return None if key is None else hmac.new(key, about.encode(), hashlib.sha256).hexdigest()


def secret_name(job: TrainingJob, suffix: str) -> str:
    """A name that nobody has by chance: the job's uid and a random suffix."""
    return f"catj-{job.uid}-{suffix}"


def secret(job: TrainingJob, name: str, token: str) -> dict[str, Any]:
    """The agents' token, so that only the operator can give orders. It never changes, so the kubelet need not watch it."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": child_metadata(job, name),
        "type": "Opaque",
        "immutable": True,
        "stringData": {"token": token},
    }
