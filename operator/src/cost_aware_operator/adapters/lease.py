"""The leader's Lease."""

from __future__ import annotations

from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock


class Lease(LeaseLock):  # type: ignore[misc] # the client is not typed
    """The client's own LeaseLock, which cannot create a Lease: it passes `pretty=True` where 37.0 wants a string."""

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        """Creates the Lease; False where another replica was first."""
        body = client.V1Lease(metadata=client.V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        try:
            await self.api_instance.create_namespaced_lease(namespace, body)
        except ApiException:
            return False
        return True
