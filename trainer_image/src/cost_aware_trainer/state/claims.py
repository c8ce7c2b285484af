"""Claims to a folder of checkpoints: only the newest attempt of the job that has it may publish or remove a checkpoint.

`claims/claim-00000007.json` names a job and an attempt. The claim with the highest number holds. A claim appears whole, under a name
that no other process can get, by a hard link (or by O_EXCL where there are none). So two that claim at once get different numbers, and
the one with the lower number has lost.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cost_aware_trainer.contract import ENV_ATTEMPT, ENV_JOB_UID
from cost_aware_trainer.state.validation import InvalidRunError

FOLDER = "claims"
_NAME = re.compile(r"claim-(\d{8,})\.json")
_WITHOUT_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_KEPT = 2
_TRIES = 100


class ClaimLostError(RuntimeError):
    """Folder that a newer attempt, or another job, has claimed. This one may not change anything in it any more."""


@dataclass(frozen=True)
class Claim:
    """One claim to a folder."""

    number: int
    """Number of the claim; the highest one holds."""
    job_uid: str
    """Uid of the job; empty for a run that was started by hand."""
    attempt: int
    """Attempt of the job."""
    former: tuple[str, ...] = ()
    """Uids of the jobs that had the folder before, and cannot have it back by themselves."""


class FolderClaim:
    """Claim of this process to a folder. A run without a job's uid makes none where there are none."""

    def __init__(self, root: Path, job_uid: str, attempt: int) -> None:
        self._root, self._attempt = root, attempt
        self.job_uid = job_uid
        """Uid of the job; empty for a run that was started by hand."""
        self._held = 0

    @classmethod
    def from_environment(cls, root: Path, environment: Mapping[str, str]) -> FolderClaim:
        """Makes the claim of the job and attempt that the agent has named."""
        return cls(root, environment.get(ENV_JOB_UID, ""), int(environment.get(ENV_ATTEMPT) or 0))

    def check_before(self) -> None:
        """Checks that this attempt may claim the folder.

        Raises:
            ClaimLostError: a newer attempt of the job has it.
            InvalidRunError: the job had it once, and another job has it now.
        """
        newest = self._newest()
        if newest is None:
            return
        if newest.job_uid == self.job_uid and newest.attempt > self._attempt:
            raise ClaimLostError(self._lost(newest))
        if newest.job_uid != self.job_uid and self.job_uid in newest.former:
            raise InvalidRunError(
                f"checkpoint.folder: {self._root} went from this job to the job of uid {newest.job_uid or '(by hand)'}; give "
                f"this job another folder, or remove {self._root / FOLDER} when that job is gone"
            )

    def take(self) -> None:
        """Claims the folder; raises what `check_before` raises."""
        for _ in range(_TRIES):
            self.check_before()
            newest = self._newest()
            if newest is None and not self.job_uid:
                return
            former: tuple[str, ...] = newest.former if newest else ()
            if newest and newest.job_uid not in (self.job_uid, *former):
                former = (*former, newest.job_uid)
            claim = Claim(newest.number + 1 if newest else 1, self.job_uid, self._attempt, former)
            if self._create(claim):
                self._held = claim.number
                self._remove_old()
                return
        raise ClaimLostError(f"{self._root}: others claim it again and again")

    def check(self, attempt: int | None = None) -> None:
        """Checks that the claim holds, just before something is published or removed.

        Args:
            attempt: the attempt that the process goes on with, if it is another one by now.

        Raises:
            ClaimLostError: it does not.
        """
        newest = self._newest()
        if (newest.number if newest else 0) != self._held:
            raise ClaimLostError(self._lost(newest))
        if attempt is not None and attempt > self._attempt:
            self._attempt = attempt
            self.take()

    def _lost(self, newest: Claim | None) -> str:
        if newest is None:
            return f"{self._root}: the claims of this job are gone; something else has cleared the folder"
        return (
            f"{self._root} is claimed by attempt {newest.attempt} of the job of uid {newest.job_uid or '(by hand)'}; this is attempt "
            f"{self._attempt} of {self.job_uid or '(by hand)'}, which may not change it any more"
        )

    def _path(self, number: int) -> Path:
        return self._root / FOLDER / f"claim-{number:08d}.json"

    def _numbers(self) -> list[int]:
        try:
            names = os.listdir(self._root / FOLDER)
        except FileNotFoundError:
            return []
        return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))

    def _newest(self) -> Claim | None:
        numbers = self._numbers()
        if not numbers:
            return None
        try:
            document = json.loads(self._path(numbers[-1]).read_bytes())
            return Claim(numbers[-1], str(document["job_uid"]), int(document["attempt"]), tuple(document["former"]))
        except (ValueError, KeyError, TypeError, FileNotFoundError):
            # one that a power cut has torn: nobody can hold it
            return Claim(numbers[-1], "(unreadable)", 0)

    def _create(self, claim: Claim) -> bool:
        """Makes a claim appear whole; False if somebody else has the number."""
        target = self._path(claim.number)
        target.parent.mkdir(exist_ok=True)
        partial = target.with_name(f".{secrets.token_hex(8)}")
        text = json.dumps(dataclasses.asdict(claim))
        try:
            _write_durably(partial, text)
            os.link(partial, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _WITHOUT_LINKS:
                raise
            try:
                _write_durably(target, text)
            except FileExistsError:
                return False
        finally:
            partial.unlink(missing_ok=True)
        sync_folder(target.parent)
        return True

    def _remove_old(self) -> None:
        for number in self._numbers()[:-_KEPT]:
            self._path(number).unlink(missing_ok=True)


def _write_durably(path: Path, text: str) -> None:
    with path.open("x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
