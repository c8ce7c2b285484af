"""HTTP to the pods: the agents' control endpoints and the ranks' metrics. Bounded in time, size and number."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from ipaddress import ip_address
from itertools import islice

import aiohttp

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.observing.samples import RankSample, ScrapeError, parse_rank
from cost_aware_operator.sources.bounded import TooLongError, read_bounded
from cost_aware_operator.sources.metrics_source import AgentAnswers, Answers, rank_name
from cost_aware_operator.workload.views import PodView
from cost_aware_trainer.contract import (
    AGENT_PORT,
    MAX_MESSAGE_BYTES,
    METRICS_PORT,
    AgentStatus,
    ContractError,
    Message,
    PodEnds,
    Release,
    RunOrder,
)

logger = logging.getLogger(__name__)
ASKED = 3
"""Pods that are asked for what any of them can tell: agents of an older image cannot, and then none of them can."""
PLAIN = {"Accept-Encoding": "identity"}
"""Responses stay compressed: a small body may unpack to gigabytes. The session must not unpack it either."""


class RankUnreachableError(Exception):
    """A pod did not answer as agreed. The text is in words of our own: it goes into conditions, which others read."""


class RankEndpoints:
    """All pods of all jobs, over HTTP. One session; at most `concurrency` requests at a time."""

    def __init__(self, session: aiohttp.ClientSession, concurrency: int, timeout_seconds: float = 2.0) -> None:
        self._session = session
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)

    async def statuses(self, pods: Iterable[PodView]) -> AgentAnswers:
        """Agents' statuses by pod uid; agents that do not answer are left out."""
        usable = [p for p in pods if p.usable]
        answers = await asyncio.gather(*(self._status(p) for p in usable), return_exceptions=True)
        found: dict[str, AgentStatus] = {}
        unread: dict[str, str] = {}
        for pod, answer in zip(usable, answers, strict=True):
            if isinstance(answer, AgentStatus):
                found[pod.uid] = answer
                continue
            _raise_unexpected(answer)
            if isinstance(answer, ContractError):
                unread[pod.uid] = "the answer of its agent cannot be read"
        return AgentAnswers(found, unread)

    async def ends(self, pods: Iterable[PodView]) -> dict[str, datetime]:
        """Ends of a job's pods by uid, as a live agent can tell them; the first of a few that answers is believed."""
        for pod in islice(pods, ASKED):
            try:
                told = PodEnds.from_json(await self._get(f"http://{_host(pod)}:{AGENT_PORT}/ends"))
                return {end.pod_uid: datetime.fromtimestamp(end.ended_at, UTC) for end in told.ends}
            except (RankUnreachableError, ValueError, OverflowError, OSError) as error:
                # an agent of an older image does not know the question
                logger.debug("pod %s does not tell when others ended: %s", pod.name, error)
        return {}

    async def samples(self, job: JobKey, pods: Iterable[PodView], ranks_per_node: int) -> Answers:
        """Ranks' metrics, from each rank's own endpoint."""
        usable = [p for p in pods if p.usable]
        targets = [(p, rank) for p in usable for rank in range(ranks_per_node)]
        answers = await asyncio.gather(*(self._sample(p, rank) for p, rank in targets), return_exceptions=True)
        found: dict[str, tuple[RankSample, ...]] = {}
        unheard: dict[str, str] = {}
        for (pod, local), answer in zip(targets, answers, strict=True):
            if isinstance(answer, RankSample):
                found[pod.uid] = (*found.get(pod.uid, ()), answer)
            else:
                _raise_unexpected(answer)
                unheard[rank_name(pod.index * ranks_per_node + local, pod)] = why_unheard(answer)
        return Answers(found, unheard)

    async def order(self, pods: Iterable[PodView], order: RunOrder, token: str) -> dict[str, str]:
        """Tells agents of an attempt, again and again until they hear it; returns why some refuse it."""
        told = tuple(pods)
        answers = await asyncio.gather(*(self._post(p, "order", order, token) for p in told))
        return {pod.uid: why for pod, why in zip(told, answers, strict=True) if why}

    async def release(self, pods: Iterable[PodView], release: Release, token: str) -> None:
        """Lets pods go."""
        await asyncio.gather(*(self._post(p, "release", release, token) for p in pods))

    async def _status(self, pod: PodView) -> AgentStatus:
        return AgentStatus.from_json(await self._get(f"http://{_host(pod)}:{AGENT_PORT}/status"))

    async def _sample(self, pod: PodView, local_rank: int) -> RankSample:
        return parse_rank(await self._get(f"http://{_host(pod)}:{METRICS_PORT + local_rank}/metrics"))

    async def _get(self, url: str) -> str:
        async with self._slots:
            try:
                # a redirect would have the operator read, in its own network, whatever a pod names
                async with self._session.get(
                    url, timeout=self._timeout, headers=PLAIN, allow_redirects=False
                ) as answer:
                    if answer.status != 200:
                        raise RankUnreachableError(f"{url}: the answer has the status {answer.status}, not 200")
                    return (await read_bounded(answer, MAX_MESSAGE_BYTES)).decode()
            except UnicodeDecodeError:
                raise RankUnreachableError(f"{url}: the answer is not text") from None
            except TooLongError as error:
                raise RankUnreachableError(str(error)) from None
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                logger.debug("%s: %r", url, error)
                raise RankUnreachableError(f"{url}: {why_failed(error)}") from error

    async def _post(self, pod: PodView, path: str, message: Message, token: str) -> str:
        """Sends a message; returns why the agent refuses it, empty if it does not or was not reached."""
        try:
            url = f"http://{_host(pod)}:{AGENT_PORT}/{path}"
        except RankUnreachableError as error:
            logger.warning("%s", error)
            return ""
        headers: Mapping[str, str] = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        async with self._slots:
            try:
                async with self._session.post(
                    url, data=message.to_json(), headers=headers, timeout=self._timeout, allow_redirects=False
                ) as answer:
                    if answer.status >= 300:
                        said = (await read_bounded(answer, MAX_MESSAGE_BYTES)).decode(errors="replace")[:300]
                        logger.warning("pod %s answered %s to %s: %s", pod.name, answer.status, path, said)
                        return f"its agent refuses the {path} with the status {answer.status}"
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                logger.info("pod %s did not hear %s: %r", pod.name, path, error)
        return ""


def why_unheard(answer: BaseException) -> str:
    """Why a pod's answer is none, in fixed words: what it said itself may have come from anywhere."""
    if isinstance(answer, RankUnreachableError):
        return str(answer)
    return "its answer is not a rank's metrics" if isinstance(answer, ScrapeError) else "its answer cannot be read"


def why_failed(error: Exception) -> str:
    """What went wrong on the way, in fixed words: the client's own texts quote what it was sent."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorError | ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, aiohttp.ClientConnectionError | ConnectionError):
        return "the connection broke"
    return "the answer is not HTTP" if isinstance(error, aiohttp.ClientError) else "it cannot be reached"


def _host(pod: PodView) -> str:
    """The pod's own address as a URL has it.

    Raises:
        RankUnreachableError: the address is none that a pod can have.
    """
    try:
        address = ip_address(pod.ip or "")
    except ValueError:
        raise RankUnreachableError(f"pod {pod.name} has no address") from None
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        # a cloud's metadata is served at such an address, and no pod is
        raise RankUnreachableError(f"pod {pod.name} has the address {address}, which no pod can have")
    return f"[{address}]" if address.version == 6 else str(address)


def _raise_unexpected(answer: BaseException) -> None:
    """Silence of a pod is ordinary; anything else is raised."""
    if isinstance(answer, ContractError | ScrapeError):
        logger.warning("a pod does not follow the contract: %s", answer)
    elif not isinstance(answer, RankUnreachableError):
        raise answer
