"""The ranks' metrics from a Prometheus server that scrapes the pods in the operator's stead."""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import aiohttp

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.observing.samples import RankSample, ScrapeError, sample_of
from cost_aware_operator.sources.bounded import TooLongError, read_bounded
from cost_aware_operator.sources.metrics_source import Answers, rank_name
from cost_aware_operator.sources.rank_endpoints import why_failed, why_unheard
from cost_aware_operator.workload.views import PodView
from cost_aware_trainer.contract import Metric

logger = logging.getLogger(__name__)
REDIRECTS = range(300, 400)
READ = (
    Metric.STEP, Metric.TOTAL_STEPS, Metric.STEPS, Metric.TOKENS, Metric.STEP_SECONDS, Metric.MODEL_FLOPS,
    Metric.COMMUNICATION_BYTES, Metric.MEMORY_BYTES, Metric.LOSS, Metric.HELDOUT_LOSS, Metric.CHECKPOINT_STEP,
    Metric.RESUMED_STEP, Metric.PHASE_SECONDS, Metric.LINK_BANDWIDTH, Metric.RECONFIGURATION_SECONDS,
)  # fmt: skip
MAX_BYTES = 20 * 2**20
"""Largest answer that is read: some 2,500 ranks."""
STALE_SECONDS = 120.0
"""A sample that is older says nothing of the present."""


class PrometheusError(Exception):
    """The server did not answer as its API says."""


@dataclass
class _Series:
    """One rank's series of one attempt."""

    labels: Mapping[str, str]
    """Labels of the newest series."""
    values: dict[str, float] = field(default_factory=dict)
    """Values by metric."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase."""
    links: dict[str, float] = field(default_factory=dict)
    """Bytes a second by level of link."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds by stage of the launch."""
    age_seconds: float = 0.0
    """Seconds since Prometheus read it."""


class PrometheusSource:
    """A Prometheus server's instant queries. Two a job, at once, within one time limit.

    `token_file` holds what is sent as a bearer token. It is read for each query, so that a token may be replaced.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, timeout_seconds: float = 5.0, token_file: Path | None = None
    ) -> None:
        self._session, self._token_file = session, token_file
        self._url = f"{url.rstrip('/')}/api/v1/query"
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)

    async def samples(self, job: JobKey, pods: Iterable[PodView], ranks_per_node: int) -> Answers:
        """The newest attempt's samples by namespace and job; a rank without a fresh one is told with the reason."""
        usable = {pod.index: pod for pod in pods if pod.usable}
        targets = {
            pod.index * ranks_per_node + local: pod for pod in usable.values() for local in range(ranks_per_node)
        }
        if not targets:
            return Answers()
        try:
            series = await self._series(job, targets)
        except PrometheusError as error:
            return Answers(unheard={rank_name(rank, pod): str(error) for rank, pod in targets.items()})
        samples: dict[str, tuple[RankSample, ...]] = {}
        unheard: dict[str, str] = {}
        ages: list[float] = []
        for rank, pod in targets.items():
            try:
                samples[pod.uid] = (*samples.get(pod.uid, ()), _sample(series.get(rank)))
                ages.append(series[rank].age_seconds)
            except _MissingError as error:
                unheard[rank_name(rank, pod)] = str(error)
            except ScrapeError as error:
                unheard[rank_name(rank, pod)] = why_unheard(error)
        return Answers(samples, unheard, statistics.median(ages) if ages else 0.0)

    async def _series(self, job: JobKey, targets: Mapping[int, PodView]) -> dict[int, _Series]:
        """Series of each rank's newest attempt, by rank, as they were read from the rank's own pod."""
        wanted = "|".join(READ)
        headers = await self._headers()
        read, told = await asyncio.gather(
            self._query(" or ".join(_selectors(f'__name__=~"{wanted}"', job)), headers),
            # of anything but a selector, `timestamp` is the time of the query
            self._query(
                " or ".join(f"timestamp({one})" for one in _selectors(f'__name__="{Metric.STEPS}"', job)), headers
            ),
        )
        found: dict[int, _Series] = {}
        for labels, _, value in read:
            name, rank, attempt = labels.get("__name__", ""), _whole(labels.get("rank")), _whole(labels.get("attempt"))
            if rank is None or attempt is None or not _is_of(labels, targets.get(rank)):
                continue
            known = found.get(rank)
            if known is None or attempt > int(known.labels["attempt"]):
                known = found[rank] = _Series(labels)
            elif attempt < int(known.labels["attempt"]):
                continue
            if name == Metric.PHASE_SECONDS:
                known.phases[labels.get("phase", "")] = value
            elif name == Metric.LINK_BANDWIDTH:
                known.links[labels.get("level", "")] = value
            elif name == Metric.RECONFIGURATION_SECONDS:
                known.stages[labels.get("stage", "")] = value
            else:
                known.values[name] = value
        for labels, now, then in told:
            rank = _whole(labels.get("rank"))
            if (
                rank in found
                and labels.get("attempt") == found[rank].labels["attempt"]
                and _is_of(labels, targets[rank])
            ):
                found[rank].age_seconds = max(0.0, now - then)
        return found

    async def _headers(self) -> dict[str, str]:
        """Headers with the token as it is now.

        Raises:
            PrometheusError: it cannot be read.
        """
        headers = {"Accept-Encoding": "identity"}
        if self._token_file is None:
            return headers
        try:
            token = await asyncio.to_thread(self._token_file.read_text)
        except (OSError, UnicodeError) as error:
            raise PrometheusError(f"the token for {self._url}: {error!r}") from error
        return {**headers, "Authorization": f"Bearer {token.strip()}"}

    async def _query(self, query: str, headers: Mapping[str, str]) -> list[tuple[Mapping[str, str], float, float]]:
        """Labels, time of evaluation and value of each element.

        Raises:
            PrometheusError: no answer in time, one too large, or one that is none.
        """
        try:
            async with self._session.post(
                self._url, data={"query": query}, timeout=self._timeout, headers=headers, allow_redirects=False
            ) as answer:
                if answer.status in REDIRECTS:
                    raise PrometheusError(
                        f"{self._url} sends elsewhere ({answer.status}), and nothing is read there: write the address itself"
                    )
                body = await read_bounded(answer, MAX_BYTES)
                document: Any = json.loads(body)
                if not isinstance(document, dict) or document.get("status") != "success":
                    logger.warning("%s answered %s: %s", self._url, answer.status, str(document)[:300])
                    raise PrometheusError(f"{self._url} answered {answer.status}, and no success")
            return [
                ({str(k): str(v) for k, v in one["metric"].items()}, float(one["value"][0]), float(one["value"][1]))
                for one in document["data"]["result"]
            ]
        except TooLongError as error:
            raise PrometheusError(str(error)) from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.debug("%s: %r", self._url, error)
            raise PrometheusError(f"{self._url}: {why_failed(error)}") from error
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            logger.debug("%s: %r", self._url, error)
            raise PrometheusError(f"{self._url}: not an answer of Prometheus") from error


class _MissingError(ScrapeError):
    """Prometheus has nothing of a rank, or nothing new; the text is in words of our own."""


def _is_of(labels: Mapping[str, str], pod: PodView | None) -> bool:
    """Whether Prometheus read a series from a pod's own address: any pod may call itself a rank of this job.

    `instance` is the address that was read, unless the scrape configuration writes something else there; then `pod` counts.
    """
    if pod is None:
        return False
    host = labels.get("instance", "").rpartition(":")[0]
    try:
        return ip_address(host.strip("[]")) == ip_address(pod.ip or "")
    except ValueError:
        return labels.get("pod", pod.name) == pod.name


def _selectors(name: str, job: JobKey) -> tuple[str, str]:
    """A rank's own labels, or with `exported_` before them where the scrape configuration has labels of these names too."""
    own = f'{{{name},namespace="{job.namespace}",job="{job.name}"}}'
    renamed = f'{{{name},exported_namespace="{job.namespace}",exported_job="{job.name}"}}'
    return own, renamed


def _sample(series: _Series | None) -> RankSample:
    if series is None:
        raise _MissingError("Prometheus has no series of it: does it scrape the pods' metrics ports?")
    if series.age_seconds > STALE_SECONDS:
        raise _MissingError(f"Prometheus read it last {series.age_seconds:.0f} s ago")
    return sample_of(series.labels, series.values, series.phases, series.links, series.stages)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 10 else None
