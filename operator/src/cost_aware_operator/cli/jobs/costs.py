"""`catj costs`: bills of jobs that run and of jobs that are gone, and their backup."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from cost_aware_operator.cli.jobs.on_cluster import on_cluster, say
from cost_aware_operator.control.reading.bills import KEY_BILL, KEY_OLDER, LABEL_BILL, OLDER
from cost_aware_operator.engines.cluster import Cluster, ConflictError
from cost_aware_operator.ledger.bill import Bill
from cost_aware_operator.ledger.blocks import total_usd

OPERATOR_NAMESPACE = "cost-aware-training"
VERSION = 1
"""Version of the backup's form."""


class BackupError(ValueError):
    """A file is no backup of bills; the text says what is wrong."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `catj costs`."""
    parser.add_argument(
        "--closed", action="store_true", help="bills of jobs that are gone, instead of those that are there"
    )
    parser.add_argument("-n", "--namespace", help="of jobs in this namespace (default: in all)")
    parser.add_argument(
        "--operator-namespace",
        default=OPERATOR_NAMESPACE,
        metavar="NAMESPACE",
        help=f"where the bills are ({OPERATOR_NAMESPACE})",
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument(
        "--backup", type=Path, metavar="FILE.json", help="write all bills, open and closed, into a file"
    )
    parser.add_argument(
        "--restore",
        type=Path,
        metavar="FILE.json",
        help="make the bills of a file that are missing; one that is there is left alone",
    )


def run(arguments: argparse.Namespace) -> int:
    """Shows, writes or restores bills; returns the exit status."""
    return on_cluster(lambda cluster, console: costs(cluster, arguments, console))


async def costs(cluster: Cluster, arguments: argparse.Namespace, console: Console) -> int:
    """Shows, writes or restores bills; returns the exit code.

    Raises:
        ApiError: the API server refused or could not be reached.
    """
    where: str = arguments.operator_namespace
    if arguments.restore is not None:
        return await _restore(cluster, where, arguments.restore, console)
    if arguments.backup is not None:
        document = await backed_up(cluster, where)
        text = json.dumps(document, indent=1, sort_keys=True) + "\n"
        await asyncio.to_thread(arguments.backup.write_text, text, encoding="utf-8")
        say(console, f"{len(document['bills'])} bills of namespace {where} are in {arguments.backup}")
        return 0
    listed = await cluster.config_maps(where, {LABEL_BILL: "closed" if arguments.closed else "open"})
    bills, unread = _read(listed)
    bills = [b for b in bills if arguments.namespace in (None, b.namespace)]
    older = await cluster.config_map(where, OLDER) if arguments.closed else None
    sums: dict[str, Any] = json.loads(older.data.get(KEY_OLDER, "{}")) if older is not None else {}
    if arguments.output == "json":
        console.print_json(json.dumps({"bills": [json.loads(b.model_dump_json()) for b in bills], "older": sums}))
    else:
        for line in lines(bills, {n: s for n, s in sums.items() if arguments.namespace in (None, n)}):
            say(console, line)
    for name in unread:
        say(console, f"catj: ConfigMap {name!r} in namespace {where!r} is no bill: restore it from a backup")
    return 1 if unread else 0


def lines(bills: Sequence[Bill], older: dict[str, Any]) -> list[str]:
    """Bills as text, one a line, the newest first, and their sum."""
    if not bills and not older:
        return ["there are no such bills"]
    found = []
    for bill in sorted(bills, key=lambda b: b.opened_at, reverse=True):
        ends = bill.closed_at.isoformat(timespec="seconds") if bill.closed_at is not None else "open"
        about = " (a pod's end is not known: at least)" if bill.estimated else ""
        unpriced = bill.ledger.unpriced_pod_seconds
        free = f", and {unpriced:,.0f} pod-seconds without a price" if unpriced else ""
        name = f"{bill.namespace}/{bill.name}"
        found.append(
            f"{name}  {bill.outcome or '–'}  {bill.opened_at.isoformat(timespec='seconds')} to {ends}  "
            f"${total_usd(bill.ledger):,.2f}{about}{free}  uid {bill.uid}"
        )
    for namespace, sums in sorted(older.items()):
        found.append(f"{namespace}  {sums['jobs']} older jobs  ${sums['usd']:,.2f}")
    total = sum(total_usd(b.ledger) for b in bills) + sum(s["usd"] for s in older.values())
    return [*found, f"in all ${total:,.2f}"]


async def backed_up(cluster: Cluster, namespace: str) -> dict[str, Any]:
    """All bills and the sums of older ones, as they are stored."""
    listed = [d for state in ("open", "closed") for d in await cluster.config_maps(namespace, {LABEL_BILL: state})]
    bills = [
        {"name": d["metadata"]["name"], "labels": d["metadata"].get("labels") or {}, "data": d.get("data") or {}}
        for d in listed
    ]
    older = await cluster.config_map(namespace, OLDER)
    return {"version": VERSION, "bills": bills, "older": dict(older.data) if older is not None else None}


async def restored(cluster: Cluster, namespace: str, document: Any) -> tuple[int, int]:
    """Makes the bills of a backup that are missing; returns how many were made, and how many were there.

    Raises:
        BackupError: it is no backup.
    """
    if (
        not isinstance(document, dict)
        or document.get("version") != VERSION
        or not isinstance(document.get("bills"), list)
    ):
        raise BackupError(f"not a backup of version {VERSION}: write one with catj costs --backup")
    wanted = [(one["name"], one["labels"], one["data"]) for one in document["bills"]]
    if document.get("older") is not None:
        wanted.append((OLDER, {}, document["older"]))
    made = 0
    for name, labels, data in wanted:
        metadata = {"name": name, "namespace": namespace, "labels": labels}
        try:
            await cluster.save_config_map(
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}, None
            )
        except ConflictError:
            continue
        made += 1
    return made, len(wanted) - made


async def _restore(cluster: Cluster, namespace: str, path: Path, console: Console) -> int:
    try:
        text = await asyncio.to_thread(path.read_text, encoding="utf-8")
        made, there = await restored(cluster, namespace, json.loads(text))
    except (OSError, ValueError, KeyError, TypeError) as error:
        say(console, f"catj: {path}: {error}")
        return 1
    say(console, f"{made} bills are made again in namespace {namespace}; {there} were there and are left as they are")
    return 0


def _read(listed: Sequence[dict[str, Any]]) -> tuple[list[Bill], list[str]]:
    """Bills, and the names of what is none."""
    bills, unread = [], []
    for document in listed:
        try:
            bills.append(Bill.model_validate_json((document.get("data") or {}).get(KEY_BILL, "")))
        except ValueError:
            unread.append(document["metadata"]["name"])
    return bills, unread
