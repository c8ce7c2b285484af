"""The screen that tables are printed on."""

from __future__ import annotations

from rich.console import Console

PIPE_COLUMNS = 200
"""Width where there is no terminal: whoever reads a pipe wants whole lines."""
NARROW_COLUMNS = 150
"""Width below which tables leave out columns, or say the same on more lines."""


def console() -> Console:
    """The console: as wide as the terminal, and without colours in a pipe."""
    found = Console()
    return found if found.is_terminal else Console(width=PIPE_COLUMNS)


def is_narrow(screen: Console) -> bool:
    """Whether there is no room for whole tables."""
    return screen.width < NARROW_COLUMNS
