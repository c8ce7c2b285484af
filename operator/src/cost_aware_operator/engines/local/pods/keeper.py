"""Process that keeps one pod: `python -m cost_aware_operator.engines.local.pods.keeper FOLDER FD`.

It starts the agent, keeps its log short, ends it when it is told to, and writes down how it ended. The descriptor is the kubelet's
lifeline: `end SECONDS` and a new line ask for the pod's end within that time, and so does the pipe's own end, with the pod's
grace. So a pod never outlives its kubelet by more than its grace, and its exit code is known to the next one.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from cost_aware_operator.engines.local.pods.launch import (
    KeeperRecord,
    PodFolder,
    PodLaunch,
    ProcessEnd,
    ProcessIdentity,
)
from cost_aware_operator.engines.local.pods.proc import adopt_orphans, kill_pod

POLL_SECONDS = 0.05
EXIT_CANNOT_START = 128
"""Exit code of a pod whose agent could not be started, as a kubelet writes it."""


class Keeper:
    """Keeper of one pod."""

    def __init__(self, folder: PodFolder, launch: PodLaunch, lifeline: int) -> None:
        self._folder, self._launch, self._lifeline = folder, launch, lifeline
        self._is_lifeline_open = True
        self._heard = b""
        self._deadline_seconds: float | None = None
        self._is_told = False

    def ask_to_end(self, grace_seconds: float) -> None:
        """Has the pod end within so many seconds; an earlier deadline stays."""
        until_seconds = time.monotonic() + grace_seconds
        if self._deadline_seconds is None or until_seconds < self._deadline_seconds:
            self._deadline_seconds = until_seconds

    def run(self) -> None:
        """Starts the pod and stays until it has ended and its end is written down."""
        adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self.ask_to_end(self._launch.grace_seconds))
        self._folder.write_end(self._lived())

    def _lived(self) -> ProcessEnd:
        """The pod's life from its start to its end."""
        started_at, temporary = time.time(), Path(self._launch.temporary_folder)
        try:
            temporary.mkdir(mode=0o700)
            process, lifeline = self._start()
        except OSError as error:
            if not isinstance(error, FileExistsError):
                shutil.rmtree(temporary, ignore_errors=True)
            why = f"{error.filename or self._launch.command[0]}: {error.strerror}"
            return ProcessEnd(EXIT_CANNOT_START, None, time.time(), "StartError", why)
        with lifeline:
            me, agent = ProcessIdentity.of(os.getpid()), ProcessIdentity.of(process.pid)
            if me is not None and agent is not None:
                self._folder.write_keeper(KeeperRecord(me, agent, started_at))
            while process.poll() is None:
                self._listen()
                self._act(process)
                self._shorten_log()
            finished_at = time.time()
            kill_pod(self._folder.path, os.getpid())
        code = process.returncode
        shutil.rmtree(temporary, ignore_errors=True)
        return ProcessEnd(code if code >= 0 else 128 - code, started_at, finished_at)

    def _start(self) -> tuple[subprocess.Popen[bytes], contextlib.ExitStack]:
        """Starts the agent with a lifeline of its own, which closes when this keeper dies."""
        held = contextlib.ExitStack()
        reading, writing = os.pipe()
        held.callback(os.close, writing)
        try:
            with self._folder.log.open("ab") as log:
                process = subprocess.Popen(  # noqa: S603  the kubelet's own command
                    [*self._launch.command, "--lifeline-fd", str(reading)],
                    env=dict(self._launch.environment),
                    cwd=self._launch.working_folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[reading],
                    start_new_session=True,
                )
        except OSError:
            held.close()
            raise
        finally:
            os.close(reading)
        return process, held

    def _listen(self) -> None:
        """Hears what the kubelet says, for a moment."""
        if not self._is_lifeline_open:
            time.sleep(POLL_SECONDS)
            return
        readable, _, _ = select.select([self._lifeline], [], [], POLL_SECONDS)
        if not readable:
            return
        said = os.read(self._lifeline, 4096)
        if not said:
            self._is_lifeline_open = False
            self.ask_to_end(self._launch.grace_seconds)
        *lines, self._heard = (self._heard + said).split(b"\n")
        for line in lines:
            word, _, seconds = line.partition(b" ")
            if word == b"end":
                self.ask_to_end(float(seconds))

    def _act(self, process: subprocess.Popen[bytes]) -> None:
        if self._deadline_seconds is None:
            return
        if not self._is_told:
            self._is_told = True
            process.terminate()
        if time.monotonic() >= self._deadline_seconds:
            process.kill()
            kill_pod(self._folder.path, os.getpid())

    def _shorten_log(self) -> None:
        """Begins the log anew once it is long. Writers append, so they go on at its new beginning."""
        with contextlib.suppress(OSError):
            self._begin_log_anew()

    def _begin_log_anew(self) -> None:
        log = self._folder.log
        if log.stat().st_size <= self._launch.log_bytes:
            return
        copy = log.with_name("log.partial")
        shutil.copyfile(log, copy)
        os.truncate(log, 0)
        # last of all: whoever follows the log knows by another file of this name that it has begun anew
        copy.replace(self._folder.older_log)


def main() -> int:
    """Keeps the pod, unless another process does, or did."""
    folder, lifeline = PodFolder(Path(sys.argv[1])), int(sys.argv[2])
    os.set_inheritable(lifeline, False)
    with folder.locked() as is_mine:
        launch = folder.launch()
        if is_mine and launch is not None and folder.end() is None:
            Keeper(folder, launch, lifeline).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
