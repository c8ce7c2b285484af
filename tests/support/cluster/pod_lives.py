"""A second opinion on how long a job's pods lived, which the operator's books are held against."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from devtools.cluster import Space


def documents(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """The JSON documents that a process prints, indented as kubectl does, one after the other until it ends."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line == "}\n":
            yield json.loads("".join(lines))
            lines.clear()


@dataclass
class PodLives:
    """Watches a job's pods beside the operator and adds up their seconds: the truth that the ledger is held against.

    A deleted pod is listed only for an instant after its containers' end has been told: a watch hears of it, and of force-deleted
    ones the moment; lists taken all the while bridge the times when the watch is broken.
    """

    space: Space
    job: str
    lives: dict[str, tuple[datetime, datetime | None]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _watching: subprocess.Popen[str] | None = None
    _seen_at: dict[str, datetime] = field(default_factory=dict)
    _node_of: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> PodLives:
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._list, self._watch)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._watching is not None:
            self._watching.terminate()
        for thread in self._threads:
            thread.join(30)

    def _list(self) -> None:
        while not self._stop.is_set():
            # while the control plane is away nothing is seen, and nothing changes
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
                for pod in self.space.pods(self.job):
                    self._see(pod)
            self._stop.wait(0.2)

    def _watch(self) -> None:
        while not self._stop.is_set():
            with self.space.watch_pods(self.job) as self._watching:
                for document in documents(self._watching):
                    # an API server that goes away says so in a Status
                    if document["kind"] == "Pod":
                        self._see(document)
            self._stop.wait(0.2)

    def _see(self, pod: dict[str, Any]) -> None:
        status = pod.get("status", {})
        if not status.get("startTime"):
            return
        states = [c.get("state", {}).get("terminated") for c in status.get("containerStatuses", [])]
        ended = next((s["finishedAt"] for s in states if s and s.get("finishedAt")), None)
        uid = pod["metadata"]["uid"]
        # a list and a watch are not in step: what one knows of an end, the other does not take back
        end = datetime.fromisoformat(ended) if ended else self.lives.get(uid, (None, None))[1]
        self.lives[uid] = (datetime.fromisoformat(status["startTime"]), end)
        # a pod that is force-deleted vanishes without an end: the last moment it was seen is its end
        self._seen_at[uid] = datetime.now().astimezone()
        self._node_of[uid] = pod["spec"]["nodeName"]

    def end(self, uid: str) -> datetime:
        return self.lives[uid][1] or self._seen_at[uid]

    def seconds(self) -> float:
        return sum(self.seconds_by_node().values())

    def seconds_by_node(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for uid, (start, _) in self.lives.items():
            node = self._node_of[uid]
            total[node] = total.get(node, 0.0) + (self.end(uid) - start).total_seconds()
        return total
