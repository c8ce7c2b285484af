"""The operator's configuration, from the environment that the Helm chart sets."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cost_aware_operator.app.logs import LogFormat


class SettingsError(ValueError):
    """An environment variable cannot be used; the text names it."""


@dataclass(frozen=True)
class Settings:
    """Settings of this process."""

    namespace: str
    """Namespace of the operator itself: its Lease and its key."""
    identity: str
    """This replica's name, as the Lease's holder."""
    lease_name: str
    """The Lease by which one replica leads."""
    key_secret: str
    """The Secret with the key that agents' tokens are made from."""
    prices_file: Path | None
    """Prices of the installation; None for the shipped book alone."""
    pod_defaults_file: Path | None
    """What is added to every pod; None for nothing."""
    watch_namespaces: tuple[str, ...]
    """Empty means all."""
    scrape_interval_seconds: float
    """Seconds between two looks at a job that trains."""
    scrape_concurrency: int
    """Requests to pods at one time."""
    prometheus_url: str | None
    """A server that is asked for the ranks' metrics; None: the ranks are."""
    prometheus_token_file: Path | None
    """What it is sent as a bearer token."""
    workers: int
    """Jobs that are reconciled at one time."""
    port: int
    """The port of probes and metrics."""
    log_level: str
    """DEBUG, INFO, WARNING or ERROR."""
    log_format: LogFormat
    """How a line of the log is written."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Reads the settings.

        Raises:
            SettingsError: a variable has an impossible value.
        """
        prices, defaults = environment.get("CATJ_PRICES_FILE"), environment.get("CATJ_POD_DEFAULTS_FILE")
        token = environment.get("CATJ_PROMETHEUS_TOKEN_FILE")
        return cls(
            namespace=environment.get("CATJ_OPERATOR_NAMESPACE", "default"),
            identity=environment.get("CATJ_POD_NAME") or socket.gethostname(),
            lease_name=environment.get("CATJ_LEASE_NAME", "cost-aware-operator"),
            key_secret=environment.get("CATJ_KEY_SECRET", "cost-aware-operator-key"),
            prices_file=Path(prices) if prices else None,
            pod_defaults_file=Path(defaults) if defaults else None,
            watch_namespaces=tuple(n for n in environment.get("CATJ_WATCH_NAMESPACES", "").split(",") if n),
            scrape_interval_seconds=_seconds(environment, "CATJ_SCRAPE_INTERVAL_SECONDS", 5.0),
            scrape_concurrency=_positive(environment, "CATJ_SCRAPE_CONCURRENCY", 64),
            prometheus_url=_url(environment, "CATJ_PROMETHEUS_URL"),
            prometheus_token_file=Path(token) if token else None,
            workers=_positive(environment, "CATJ_WORKERS", 8),
            port=_positive(environment, "CATJ_PORT", 8080),
            log_level=environment.get("CATJ_LOG_LEVEL", "INFO").upper(),
            log_format=_log_format(environment),
        )


def _log_format(environment: Mapping[str, str]) -> LogFormat:
    text = environment.get("CATJ_LOG_FORMAT") or LogFormat.TEXT
    try:
        return LogFormat(text)
    except ValueError:
        raise SettingsError(f"CATJ_LOG_FORMAT must be text or json, got {text!r}") from None


def _url(environment: Mapping[str, str], name: str) -> str | None:
    text = environment.get(name, "")
    if not text:
        return None
    if urlsplit(text).scheme not in ("http", "https") or not urlsplit(text).netloc:
        raise SettingsError(f"{name} must be an address such as http://prometheus.monitoring:9090, got {text!r}")
    return text


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not 0.5 <= value <= 3600:
        raise SettingsError(f"{name} must be a number of seconds from 0.5 to 3600, got {text!r}")
    return value


def _positive(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if not text:
        return default
    if not text.isdigit() or int(text) < 1:
        raise SettingsError(f"{name} must be a whole number of at least 1, got {text!r}")
    return int(text)
