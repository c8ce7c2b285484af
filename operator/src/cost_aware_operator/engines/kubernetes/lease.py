"""The leader's Lease."""

from __future__ import annotations

import asyncio

import aiohttp
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

TIMEOUT_SECONDS = 4.0
"""Seconds of one request: several must fit between two renewals and the Lease's end."""


class Lease(LeaseLock):  # type: ignore[misc] # the client is not typed
    """The client's own LeaseLock, made to bear what it does not.

    It cannot create a Lease (it passes `pretty=True` where 37.0 wants a string), and a connection that is refused ends the
    elector at once instead of counting as one failed try.
    """

    async def get(self, name: str, namespace: str) -> tuple[bool, object]:
        """The present record, or why it cannot be had."""
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                found: tuple[bool, object] = await super().get(name, namespace)
                return found
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return False, ApiException(status=0, reason=repr(error))

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        """Creates the Lease; False where another replica was first."""
        body = client.V1Lease(metadata=client.V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await self.api_instance.create_namespaced_lease(namespace, body)
        except (ApiException, aiohttp.ClientError, OSError, TimeoutError):
            return False
        return True

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        """Renews or takes the Lease; False where it could not."""
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return bool(await super().update(name, namespace, updated_record))
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
