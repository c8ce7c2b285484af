"""The Kubernetes API: reading objects, server-side apply, the status subresource, events."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException

from cost_aware_operator.api import FIELD_OWNER, GROUP, KIND, PLURAL, VERSION
from cost_aware_operator.api.job import JobKey, JobReference
from cost_aware_operator.engines.cluster import (
    ApiError,
    ConflictError,
    StoredData,
    event_document,
    owner_uids,
    status_document,
)
from cost_aware_operator.workload.job import ANNOTATION_ASKED, asked_to_suspend

REQUEST_TIMEOUT_SECONDS = 15.0
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"

_PATHS = {
    "Job": "apis/batch/v1/namespaces/{}/jobs",
    "Service": "api/v1/namespaces/{}/services",
    "Secret": "api/v1/namespaces/{}/secrets",
    "ConfigMap": "api/v1/namespaces/{}/configmaps",
    "Pod": "api/v1/namespaces/{}/pods",
    "PersistentVolumeClaim": "api/v1/namespaces/{}/persistentvolumeclaims",
    "Lease": "apis/coordination.k8s.io/v1/namespaces/{}/leases",
    KIND: f"apis/{GROUP}/{VERSION}/namespaces/{{}}/{PLURAL}",
}


async def connect(kubeconfig: str | None = None) -> client.ApiClient:
    """A client with the pod's service account, or with a kubeconfig outside a cluster (else `KUBECONFIG`'s).

    Raises:
        ApiError: neither is there.
    """
    try:
        if kubeconfig is not None:
            await config.load_kube_config(kubeconfig)
        else:
            try:
                config.load_incluster_config()
            except config.ConfigException:
                await config.load_kube_config()
    except config.ConfigException as error:
        raise ApiError(0, f"no cluster to talk to: set KUBECONFIG to a kubeconfig file ({error})") from error
    return client.ApiClient()


def default_namespace() -> str:
    """The namespace of the kubeconfig's current context, as kubectl takes it."""
    try:
        _, current = config.list_kube_config_contexts()
    except config.ConfigException:
        return "default"
    return str(current["context"].get("namespace") or "default")


class KubernetesCluster:
    """The Cluster of a Kubernetes API server. `heard` is told the server's time, as each of its answers has it."""

    def __init__(self, api: client.ApiClient, heard: Callable[[datetime], None] = lambda _: None) -> None:
        self._api, self._heard = api, heard

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        **query: str,
    ) -> dict[str, Any]:
        target = f"/{path}" + (f"?{urlencode(query)}" if query else "")
        try:
            request = await self._api.param_serialize(
                method,
                target,
                header_params={"Accept": "application/json", "Content-Type": content_type},
                body=body,
                auth_settings=["BearerToken"],
            )
            answer = await self._api.call_api(*request, _request_timeout=REQUEST_TIMEOUT_SECONDS)
            self._tell_time(str(answer.headers.get("Date", "")))
            await answer.read()
        except ApiException as error:
            raise ApiError(error.status or 0, str(error.reason)) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ApiError(0, f"the API server cannot be reached: {error!r}") from error
        try:
            document: dict[str, Any] = json.loads(answer.data or b"{}")
        except ValueError as error:
            raise ApiError(
                answer.status, f"something that is not the API server answered: {answer.data[:200]!r}"
            ) from error
        if not 200 <= answer.status < 300:
            kind = ConflictError if answer.status == 409 else ApiError
            raise kind(answer.status, str(document.get("message", answer.reason)))
        return document

    def _tell_time(self, date: str) -> None:
        with contextlib.suppress(ValueError, TypeError):
            found = parsedate_to_datetime(date)
            self._heard(found if found.tzinfo is not None else found.replace(tzinfo=UTC))

    async def _get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        try:
            return await self._call("GET", f"{_PATHS[kind].format(quote(namespace))}/{quote(name)}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def training_job(self, key: JobKey) -> dict[str, Any] | None:
        """The CostAwareTrainingJob's document."""
        return await self._get(KIND, key.namespace, key.name)

    async def training_jobs(self, namespaces: Sequence[str]) -> list[dict[str, Any]]:
        """All CostAwareTrainingJobs of some namespaces, or of all."""
        paths = [_PATHS[KIND].format(quote(n)) for n in namespaces] or [f"apis/{GROUP}/{VERSION}/{PLURAL}"]
        return [item for path in paths for item in (await self._call("GET", path)).get("items", [])]

    async def child_job(self, key: JobKey) -> dict[str, Any] | None:
        """The Indexed Job's document."""
        return await self._get("Job", key.namespace, key.name)

    async def pods(self, namespace: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """Pods by labels."""
        selector = ",".join(f"{k}={v}" for k, v in labels.items())
        path = _PATHS["Pod"].format(quote(namespace))
        return list((await self._call("GET", path, labelSelector=selector)).get("items", []))

    async def claim_exists(self, namespace: str, name: str) -> bool:
        """Whether a PersistentVolumeClaim exists."""
        return await self._get("PersistentVolumeClaim", namespace, name) is not None

    async def node(self, name: str) -> dict[str, Any] | None:
        """A node's document; None where it is gone or may not be read."""
        try:
            return await self._call("GET", f"api/v1/nodes/{quote(name)}")
        except ApiError as error:
            if error.status in (403, 404):
                return None
            raise

    async def nodes(self, instance_types: Sequence[str]) -> list[dict[str, Any]] | None:
        """Up to 500 nodes, of some instance types or of all; None where they may not be listed."""
        selector = f"node.kubernetes.io/instance-type in ({','.join(instance_types)})" if instance_types else ""
        try:
            return list((await self._call("GET", "api/v1/nodes", limit="500", labelSelector=selector)).get("items", []))
        except ApiError as error:
            if error.status == 403:
                return None
            raise

    async def pods_on(self, node: str) -> list[dict[str, Any]] | None:
        """Pods of all namespaces that take something of a node; None where they may not be listed."""
        selector = f"spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed"
        try:
            return list((await self._call("GET", "api/v1/pods", fieldSelector=selector)).get("items", []))
        except ApiError as error:
            if error.status == 403:
                return None
            raise

    async def config_map(self, namespace: str, name: str) -> StoredData | None:
        """A ConfigMap's data."""
        document = await self._get("ConfigMap", namespace, name)
        if document is None:
            return None
        return StoredData(document.get("data") or {}, document["metadata"]["resourceVersion"], owner_uids(document))

    async def config_maps(self, namespace: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """ConfigMaps by labels."""
        selector = ",".join(f"{k}={v}" for k, v in labels.items())
        path = _PATHS["ConfigMap"].format(quote(namespace))
        return list((await self._call("GET", path, labelSelector=selector)).get("items", []))

    async def service_owners(self, key: JobKey) -> frozenset[str] | None:
        """The owners' uids of the Service of a job's name; None where there is no such Service."""
        document = await self._get("Service", key.namespace, key.name)
        return None if document is None else owner_uids(document)

    async def apply(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Server-side apply; the fields written are ours, whoever had them."""
        metadata = document["metadata"]
        path = f"{_PATHS[document['kind']].format(quote(metadata['namespace']))}/{quote(metadata['name'])}"
        return await self._call("PATCH", path, document, APPLY, fieldManager=FIELD_OWNER, force="true")

    async def save_config_map(self, document: Mapping[str, Any], resource_version: str | None) -> str:
        """Creates or replaces a ConfigMap, but only over the version that was read.

        Returns:
            The new version.

        Raises:
            ConflictError: somebody wrote it in between, another leader for example.
        """
        metadata = document["metadata"]
        path = _PATHS["ConfigMap"].format(quote(metadata["namespace"]))
        if resource_version is None:
            written = await self._call("POST", path, document, fieldManager=FIELD_OWNER)
        else:
            versioned = {**document, "metadata": {**metadata, "resourceVersion": resource_version}}
            written = await self._call("PUT", f"{path}/{quote(metadata['name'])}", versioned, fieldManager=FIELD_OWNER)
        return str(written["metadata"]["resourceVersion"])

    async def set_job(
        self, key: JobKey, *, suspend: bool, active_deadline_seconds: int | None, completions: int | None
    ) -> None:
        """Sets what of a Job may change while it runs, and nothing else. An Indexed Job's pods may grow and shrink at its end."""
        path = f"{_PATHS['Job'].format(quote(key.namespace))}/{quote(key.name)}"
        spec: dict[str, Any] = {"suspend": suspend, "activeDeadlineSeconds": active_deadline_seconds}
        if completions is not None:
            spec |= {"completions": completions, "parallelism": completions}
        asked = {"annotations": {ANNOTATION_ASKED: asked_to_suspend(suspend)}}
        await self._call("PATCH", path, {"metadata": asked, "spec": spec}, MERGE, fieldManager=FIELD_OWNER)

    async def write_status(self, job: JobReference, status: Mapping[str, Any]) -> None:
        """The whole status, by server-side apply on the subresource: what is left out is removed.

        Raises:
            ConflictError: the job is not the one that was read any more; its status would be about something else.
        """
        path = f"{_PATHS[KIND].format(quote(job.key.namespace))}/{quote(job.key.name)}/status"
        document = status_document(job, status)
        await self._call("PATCH", path, document, APPLY, fieldManager=FIELD_OWNER, force="true")

    async def delete(self, kind: str, key: JobKey, uid: str) -> None:
        """Deletes an object with its dependents, if it is still the one that was meant."""
        path = f"{_PATHS[kind].format(quote(key.namespace))}/{quote(key.name)}"
        body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            await self._call("DELETE", path, body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def evict(self, namespace: str, name: str, uid: str) -> None:
        """Has a pod end gracefully, if it is still the one that was meant. A budget of disruptions may forbid it for now.

        Raises:
            ApiError: it could not be asked for; 403 without permission.
        """
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        try:
            await self._call("POST", f"{_PATHS['Pod'].format(quote(namespace))}/{quote(name)}/eviction", body)
        except ApiError as error:
            if error.status not in (404, 409, 429):
                raise

    async def post_event(
        self, job: JobReference, reason: str, message: str, *, warning: bool, at: str, name: str
    ) -> None:
        """A Kubernetes event about a job; posting the same name twice is harmless."""
        document = event_document(job, reason, message, warning=warning, at=at, name=name)
        try:
            await self._call("POST", f"api/v1/namespaces/{quote(job.key.namespace)}/events", document)
        except ConflictError:
            return

    async def create_secret(self, document: Mapping[str, Any]) -> bool:
        """Makes a Secret; False where one of its name is there already, whoever's it is. Nothing of it is read."""
        path = _PATHS["Secret"].format(quote(document["metadata"]["namespace"]))
        try:
            await self._call("POST", path, document, fieldManager=FIELD_OWNER)
        except ConflictError:
            return False
        return True

    async def own_secret(self, namespace: str, name: str, create_as: Mapping[str, str]) -> Mapping[str, str]:
        """The data (base64) of a Secret of the operator's own namespace, made as `create_as` where it is missing."""
        found = await self._get("Secret", namespace, name)
        if found is None:
            document = {"metadata": {"name": name}, "type": "Opaque", "data": dict(create_as)}
            try:
                found = await self._call("POST", _PATHS["Secret"].format(quote(namespace)), document)
            except ConflictError:
                found = await self._get("Secret", namespace, name)
        return dict((found or {}).get("data") or {})

    async def release_lease(self, namespace: str, name: str, holder: str) -> None:
        """Gives a Lease up, if it is still held: the next leader need not wait until it expires."""
        lease = await self._get("Lease", namespace, name)
        if lease is None or lease["spec"].get("holderIdentity") != holder:
            return
        lease["spec"] = {"leaseTransitions": lease["spec"].get("leaseTransitions", 0)}
        await self._call("PUT", f"{_PATHS['Lease'].format(quote(namespace))}/{quote(name)}", lease)
