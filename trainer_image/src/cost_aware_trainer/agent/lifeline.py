"""Watch over a pipe whose other end is the agent's parent: it closes when the parent dies, however it dies."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


def watch_lifeline(descriptor: int, on_end: Callable[[], None]) -> None:
    """Calls `on_end` from a thread of its own once the pipe is closed. What is written to it says nothing."""
    # no rank has any use for it
    os.set_inheritable(descriptor, False)

    def watch() -> None:
        try:
            while os.read(descriptor, 4096):
                pass
        except OSError as error:
            logger.error("the lifeline cannot be read (%s): ending", error.strerror)
        logger.info("whoever started this agent is gone: ending")
        on_end()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
