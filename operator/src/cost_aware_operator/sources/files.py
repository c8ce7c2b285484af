"""Mounted configuration that may change while the operator runs: the price ConfigMap and the pod defaults."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import yaml
from pydantic import ValidationError

from cost_aware_operator.costs.tables.price_files import parse_prices
from cost_aware_operator.costs.tables.prices import PriceBook, PriceError, shipped
from cost_aware_operator.workload.defaults import PodDefaults

logger = logging.getLogger(__name__)
T = TypeVar("T")


class WatchedFile(Generic[T]):
    """A value read from a file, read anew when the file's text changes.

    A text that cannot be read keeps the value before it, and says so once: a typing error in a price must not stop every job.
    """

    def __init__(self, path: Path | None, parse: Callable[[str], T]) -> None:
        self._path = path
        self._parse = parse
        self._text: str | None = None
        self._value = parse("")

    def value(self) -> T:
        """The present value."""
        try:
            text = self._path.read_text(encoding="utf-8") if self._path is not None else ""
        except FileNotFoundError:
            text = ""
        if text != self._text:
            self._text = text
            try:
                self._value = self._parse(text)
            except (PriceError, ValidationError, yaml.YAMLError) as error:
                logger.error("%s cannot be used and what was there before stays in force: %s", self._path, error)
        return self._value


def price_file(path: Path | None) -> WatchedFile[PriceBook]:
    """The shipped price book under a ConfigMap's rows, in any form that `parse_prices` reads."""
    book = shipped()

    def parse(text: str) -> PriceBook:
        return parse_prices(text, path.name if path else "prices", "undated", book) if text.strip() else book

    return WatchedFile(path, parse)


def defaults_file(path: Path | None) -> WatchedFile[PodDefaults]:
    """The pod defaults of the installation."""
    return WatchedFile(path, lambda text: PodDefaults.model_validate(yaml.safe_load(text) or {}))
