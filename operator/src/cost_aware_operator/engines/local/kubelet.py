"""The kubelet of a store: pods that have a node become processes of this host, and their status says how these are.

All nodes of a store are this host. The store is only used on the event loop; what waits for files or processes is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cost_aware_operator.engines.cluster import ApiError
from cost_aware_operator.engines.local.pods.dealing import NothingToDealError, deal, devices_asked
from cost_aware_operator.engines.local.pods.environment import pod_environment
from cost_aware_operator.engines.local.pods.keeping import PodProcess
from cost_aware_operator.engines.local.pods.launch import (
    ENV_POD_FOLDER,
    EXIT_UNKNOWN,
    REASON_UNKNOWN,
    PodFolder,
    PodLaunch,
    ProcessEnd,
)
from cost_aware_operator.engines.local.pods.logs import log_end, pod_folder
from cost_aware_operator.engines.local.pods.mounts import Mounts, localised
from cost_aware_operator.engines.local.pods.status import (
    LOG_MESSAGE_BYTES,
    disrupted,
    end_message,
    ended_status,
    running_status,
    waiting_status,
)
from cost_aware_operator.engines.local.pods.volumes import CannotStartError, VolumePlan, make_volumes, plan_volumes
from cost_aware_operator.engines.local.store import GRACE_SECONDS, ObjectKey, ObjectStore, Write
from cost_aware_operator.workload.names import LABEL_UID
from cost_aware_trainer.contract import (
    ENV_ENDS_FOLDER,
    ENV_POD_INDEX,
    MAX_TERMINATION_BYTES,
    MEMORY_FOLDER,
    RUN_FOLDER,
    TOKEN_FILE,
    RunOrder,
)

logger = logging.getLogger(__name__)

WRITER = "kubelet"
ENDED = ("Succeeded", "Failed")
LOGS_KEPT = 50
"""Folders of pods that are gone whose logs are kept."""
AGENT = (sys.executable, "-P", "-m", "cost_aware_trainer.agent")


@dataclass(frozen=True)
class KubeletSettings:
    """What a kubelet is told at its start."""

    state: Path
    """Folder of everything that it keeps."""
    claims: Mapping[str, Path] = field(default_factory=dict)
    """Folders of PersistentVolumeClaims by name; others have one below `state`."""
    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """GPUs of each node, as CUDA_VISIBLE_DEVICES names them."""
    agent: tuple[str, ...] = AGENT
    """Command of a pod's first process."""
    working_folder: Path = field(default_factory=Path.cwd)
    """Folder in which pods run: paths of a user's own program are looked up there."""
    poll_seconds: float = 0.2
    """Longest time between two looks."""
    log_bytes: int = 10 * 2**20
    """Bytes after which a pod's log begins anew; as many are kept of the one before."""


class Kubelet:
    """Kubelet of all nodes of a store."""

    def __init__(self, store: ObjectStore, settings: KubeletSettings) -> None:
        self._store, self._settings = store, settings
        self._state = settings.state.resolve()
        self._known: dict[str, PodProcess] = {}
        self._ends: dict[str, ProcessEnd] = {}
        self._evicted: set[str] = set()
        self._wake = asyncio.Event()
        self._has_looked_back = False
        store.watchers.append(self._on_write)

    async def run(self) -> None:
        """Goes on until it is cancelled. Pods then end within their grace: see `close`."""
        try:
            while True:
                self._wake.clear()
                try:
                    await self.sync()
                except OSError as error:
                    # a full disk for example: processes go on, and the next look may do better
                    logger.error("pods cannot be looked after: %s", error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._settings.poll_seconds)
        finally:
            for process in self._known.values():
                process.let_go()

    async def close(self) -> None:
        """Ends all pods within their grace and waits until their processes are gone; call it once `run` was cancelled.

        The store is left alone: the next kubelet over the same folder writes how they ended.
        """
        for process in self._known.values():
            process.let_go()
        while True:
            self._ends |= await asyncio.to_thread(self._look)
            if self._ends.keys() >= self._known.keys():
                return
            await asyncio.sleep(self._settings.poll_seconds)

    async def sync(self) -> None:
        """Looks at all pods and processes once, and does what is due."""
        if not self._has_looked_back:
            self._known |= await asyncio.to_thread(self._left_by_another)
            self._has_looked_back = True
        self._ends |= await asyncio.to_thread(self._look)
        pods = {pod["metadata"]["uid"]: pod for pod in self._store.list("Pod")}
        for uid, pod in pods.items():
            try:
                await self._sync_pod(uid, pod)
            except ApiError as error:
                # somebody was faster; the next look sees what is there
                logger.info("pod %s: %s", pod["metadata"]["name"], error)
        for uid in self._known.keys() - {pod["metadata"]["uid"] for pod in self._store.list("Pod")}:
            await self._forget(uid)

    def localised(self, order: RunOrder, uid: str) -> RunOrder:
        """The order as one pod can follow it; see `pods.mounts.localised`. One for an unknown pod stays as it is."""
        process = self._known.get(uid)
        if process is None:
            return order
        mine = process.launch
        others = (known.launch for known_uid, known in self._known.items() if known_uid not in self._ends)
        first = (o for o in others if (o.namespace, o.job_uid) == (mine.namespace, mine.job_uid))
        hosts = [launch.address for launch in first if launch.environment.get(ENV_POD_INDEX) == "0"]
        return localised(order, Mounts(mine.mounts), hosts[-1] if hosts else None)

    def _on_write(self, write: Write) -> None:
        if write.request.key.kind not in ("Pod", "Node") or write.refused or write.before == write.after:
            return
        if write.request.verb == "evict" and write.before is not None:
            self._evicted.add(write.before["metadata"]["uid"])
        self._wake.set()

    def _left_by_another(self) -> dict[str, PodProcess]:
        """Pods that an earlier kubelet has started, by uid."""
        found = {}
        for path in sorted((self._state / "pods").glob("*/launch.json")):
            folder = PodFolder(path.parent)
            launch = folder.launch()
            if launch is not None:
                found[launch.uid] = PodProcess(folder, launch)
        return found

    def _look(self) -> dict[str, ProcessEnd]:
        looked = {uid: process.look() for uid, process in list(self._known.items()) if uid not in self._ends}
        return {**self._ends, **{uid: end for uid, end in looked.items() if end is not None}}

    async def _sync_pod(self, uid: str, pod: dict[str, Any]) -> None:
        if not pod["spec"].get("nodeName"):
            return
        process, is_over = self._known.get(uid), (pod.get("status") or {}).get("phase") in ENDED
        if not is_over:
            pod = self._disrupted(pod)
        is_leaving = "deletionTimestamp" in pod["metadata"]
        if process is None:
            await self._sync_unknown(uid, pod, is_over=is_over, is_leaving=is_leaving)
        elif uid in self._ends:
            if not is_over:
                await self._write_end(pod, process, self._ends[uid])
            if is_leaving:
                self._remove(pod)
        elif is_over:
            # somebody else has given it up
            await asyncio.to_thread(process.ask_to_end, process.launch.grace_seconds)
        else:
            if is_leaving:
                grace_seconds = float(pod["metadata"].get("deletionGracePeriodSeconds", process.launch.grace_seconds))
                await asyncio.to_thread(process.ask_to_end, grace_seconds)
            await self._write_running(pod, process)

    async def _sync_unknown(self, uid: str, pod: dict[str, Any], *, is_over: bool, is_leaving: bool) -> None:
        if is_leaving:
            self._remove(pod)
        elif is_over:
            return
        elif (pod.get("status") or {}).get("phase") == "Running":
            # its folder was removed, and with it all that was known of its process
            now_seconds = time.time()
            end = ProcessEnd(EXIT_UNKNOWN, None, now_seconds, REASON_UNKNOWN, "The pod's folder is gone")
            address = pod["status"].get("podIP", "")
            self._patch(pod, ended_status(pod, address, end, end.message, now_seconds))
        else:
            await self._start(uid, pod)

    async def _start(self, uid: str, pod: dict[str, Any]) -> None:
        try:
            folder = pod_folder(self._state, uid)
            launch, volumes = self._prepared(uid, pod, folder)
            starting = asyncio.ensure_future(asyncio.to_thread(_started, folder, launch, volumes))
            try:
                self._known[uid] = await asyncio.shield(starting)
            except asyncio.CancelledError:
                # the thread goes on; a process that it starts must not be out of sight
                self._known[uid] = await starting
                raise
        except (CannotStartError, NothingToDealError, ValueError, OSError) as error:
            waiting = waiting_status(pod, "CreateContainerConfigError", str(error), time.time())
            self._patch(pod, waiting)

    def _prepared(self, uid: str, pod: dict[str, Any], folder: PodFolder) -> tuple[PodLaunch, VolumePlan]:
        """What a pod is to be started with; raises what its parts raise."""
        metadata, spec = pod["metadata"], pod["spec"]
        container, namespace = spec["containers"][0], metadata.get("namespace", "")

        def read(kind: str, name: str) -> dict[str, Any] | None:
            return self._store.get(ObjectKey(kind, namespace, name))

        volumes = plan_volumes(spec, folder.volumes, self._claim_folder, read)
        mounts = Mounts(volumes.mounts)
        ports = [port["containerPort"] for port in container.get("ports") or ()]
        job_uid = (metadata.get("labels") or {}).get(LABEL_UID, "")
        others = [known.launch for known_uid, known in self._known.items() if known_uid not in self._ends]
        own_devices = self._settings.devices.get(spec["nodeName"], ())
        hand = deal(uid, job_uid, ports, own_devices, devices_asked(container), others)
        # sockets' paths are at most 107 bytes long, and those of the pod's folder would nearly fill them
        temporary = f"{tempfile.gettempdir()}/catj-{secrets.token_hex(8)}"
        environment = pod_environment(pod, hand, mounts, read, os.environ)
        environment |= {ENV_POD_FOLDER: str(folder.path), "TMPDIR": temporary}
        run, memory, token = (_own(mounts, path, folder) for path in (RUN_FOLDER, MEMORY_FOLDER, TOKEN_FILE))
        files = [f"--run-folder={run}", f"--memory-folder={memory}", f"--token-file={token}"]
        launch = PodLaunch(
            uid=uid,
            name=metadata["name"],
            namespace=namespace,
            node=spec["nodeName"],
            job_uid=job_uid,
            address=hand.address,
            rendezvous_port=hand.rendezvous_port,
            grace_seconds=float(spec.get("terminationGracePeriodSeconds", GRACE_SECONDS)),
            command=(*self._settings.agent, *files, f"--termination-file={folder.termination}"),
            environment=environment,
            mounts=volumes.mounts,
            working_folder=str(self._settings.working_folder),
            temporary_folder=temporary,
            devices=hand.devices,
            ends_folder=environment.get(ENV_ENDS_FOLDER, ""),
            log_bytes=self._settings.log_bytes,
        )
        return launch, volumes

    def _claim_folder(self, claim: str) -> Path:
        own = self._settings.claims.get(claim)
        return own.resolve() if own is not None else self._state / "volumes" / claim

    def _disrupted(self, pod: dict[str, Any]) -> dict[str, Any]:
        """Says of a pod that it is evicted, or that its node is gone and that it goes with it."""
        metadata, uid = pod["metadata"], pod["metadata"]["uid"]
        key = ObjectKey.of(pod)
        if uid in self._evicted:
            why = "EvictionByEvictionAPI", "Eviction API: evicting"
        elif self._store.get(ObjectKey("Node", "", pod["spec"]["nodeName"])) is None:
            why = "DeletionByPodGC", "PodGC: node no longer exists"
        else:
            return pod
        conditions = list((pod.get("status") or {}).get("conditions") or [])
        if not any(one["type"] == "DisruptionTarget" for one in conditions):
            pod = self._patch(pod, {"conditions": disrupted(conditions, *why, time.time())})
        self._evicted.discard(uid)
        if "deletionTimestamp" not in metadata:
            self._store.delete(key, uid)
            pod = self._store.get(key) or pod
        return pod

    async def _write_running(self, pod: dict[str, Any], process: PodProcess) -> None:
        if (pod.get("status") or {}).get("phase") == "Running":
            return
        record = await asyncio.to_thread(process.folder.keeper)
        if record is not None:
            self._patch(pod, running_status(pod, process.launch.address, record.started_at, time.time()))

    async def _write_end(self, pod: dict[str, Any], process: PodProcess, end: ProcessEnd) -> None:
        message = await asyncio.to_thread(_last_words, process.folder, end)
        self._patch(pod, ended_status(pod, process.launch.address, end, message, time.time()))

    def _patch(self, pod: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
        """Writes a status onto what is there now: others write conditions too."""
        key = ObjectKey.of(pod)
        now = self._store.get(key)
        if now is None or now["metadata"]["uid"] != pod["metadata"]["uid"]:
            return pod
        mine = {one["type"]: one for one in status.get("conditions", ())}
        theirs = [one for one in (now.get("status") or {}).get("conditions") or [] if one["type"] not in mine]
        merged = {**status, "conditions": [*theirs, *mine.values()]}
        uid = {"uid": pod["metadata"]["uid"]}
        return self._store.patch(key, {"metadata": uid, "status": merged}, WRITER, only_status=True)

    def _remove(self, pod: dict[str, Any]) -> None:
        with contextlib.suppress(ApiError):
            self._store.delete(ObjectKey.of(pod), pod["metadata"]["uid"], grace_seconds=0)

    async def _forget(self, uid: str) -> None:
        """Ends the process of a pod that has left the store, and then keeps no more of it than its log."""
        process = self._known[uid]
        if uid not in self._ends:
            await asyncio.to_thread(process.ask_to_end, process.launch.grace_seconds)
            return
        await asyncio.to_thread(_tidy, process.folder)
        del self._known[uid], self._ends[uid]
        self._evicted.discard(uid)


def _own(mounts: Mounts, path: str, folder: PodFolder) -> str:
    """The host's path for one that the agent needs; a file of the pod's own where nothing is mounted there."""
    mapped = mounts.path(path)
    return mapped if mapped != path else str(folder.path / Path(path).name)


def _started(folder: PodFolder, launch: PodLaunch, volumes: VolumePlan) -> PodProcess:
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.path.chmod(0o700)
    make_volumes(volumes)
    folder.termination.touch()
    return PodProcess.started(folder, launch)


def _last_words(folder: PodFolder, end: ProcessEnd) -> str:
    words = ""
    if folder.termination.exists():
        with folder.termination.open("rb") as opened:
            words = opened.read(MAX_TERMINATION_BYTES).decode(errors="replace")
    return end_message(end, words, log_end(folder, LOG_MESSAGE_BYTES))


def _tidy(folder: PodFolder) -> None:
    """Removes all of a pod's folder but its logs and its end, and all of those of pods long gone."""
    kept = {folder.log, folder.older_log, folder.path / "ended.json", folder.path / "lock"}
    # the launch last: until it is gone, the next kubelet goes on where this one was killed
    for path in sorted(folder.path.iterdir(), key=lambda found: found.name == "launch.json"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path not in kept:
            path.unlink(missing_ok=True)
    gone = [path for path in folder.path.parent.iterdir() if not (path / "launch.json").exists()]
    for path in sorted(gone, key=lambda found: found.stat().st_mtime)[:-LOGS_KEPT]:
        shutil.rmtree(path, ignore_errors=True)
