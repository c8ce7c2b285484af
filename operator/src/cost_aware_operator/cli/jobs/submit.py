"""`catj submit JOB.yaml`: makes a job of a manifest that was checked first."""

from __future__ import annotations

import argparse
import sys

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.cli.foresee.manifest import ManifestError, read_job
from cost_aware_operator.cli.jobs.on_cluster import as_user
from cost_aware_operator.engines.cluster import ConflictError
from cost_aware_operator.engines.kubernetes.client import default_namespace
from cost_aware_operator.engines.user import UserCluster

EXIT_BAD = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `catj submit`."""
    parser.add_argument("file", metavar="JOB.yaml", help="a CostAwareTrainingJob manifest; - reads standard input")
    parser.add_argument("-n", "--namespace", help="where to make it (default: the manifest's, or the kubeconfig's)")


def run(arguments: argparse.Namespace) -> int:
    """Makes the job; returns the exit status."""
    try:
        document = read_job(arguments.file)
    except ManifestError as error:
        for line in str(error).splitlines():
            print(f"catj: {arguments.file}: {line}", file=sys.stderr)
        return EXIT_BAD
    metadata = document["metadata"]
    metadata["namespace"] = arguments.namespace or metadata.get("namespace") or default_namespace()
    return as_user(lambda cluster: submit(cluster, document))


async def submit(cluster: UserCluster, document: dict[str, object]) -> int:
    """Makes a job of a document; returns the exit status.

    Raises:
        ApiError: the API server refused or could not be reached.
    """
    metadata = document["metadata"]
    assert isinstance(metadata, dict)  # noqa: S101  `read_job` has checked it
    key = JobKey(metadata["namespace"], metadata["name"])
    try:
        await cluster.submit(document)
    except ConflictError:
        print(f"catj: {key}: there is a job of this name: delete it first, or write another name", file=sys.stderr)
        return EXIT_BAD
    print(f"{key}: is submitted; `catj watch {key.name} -n {key.namespace}` follows it")
    return 0
