"""What `catj` prints fits the terminal that it is printed on, and loses no figure there."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from tests.support import ROOT

EXAMPLE = str(ROOT / "examples/byte-gpt.yaml")
CATJ = [sys.executable, "-m", "cost_aware_operator.cli.main"]


def on_terminal(columns: int, *arguments: str) -> str:
    """What a terminal of so many columns shows, without its colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "CI", "NO_COLOR")}
    environment["TERM"] = "xterm-256color"
    process = subprocess.Popen([*CATJ, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            break
        seen += piece
    os.close(ours)
    assert process.wait(60) == 0, seen.decode()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())


def in_pipe(*arguments: str) -> str:
    return subprocess.run([*CATJ, *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("columns", [80, 110, 200])
@pytest.mark.parametrize("command", ["plan", "explain", "simulate"])
def test_no_line_is_wider_than_the_terminal(command: str, columns: int) -> None:
    shown = on_terminal(columns, command, EXAMPLE)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= columns


@pytest.mark.parametrize("columns", [80, 200])
def test_a_plan_has_its_figures_and_its_reason_at_every_width(columns: int) -> None:
    document = json.loads(in_pipe("plan", EXAMPLE, "-o", "json"))
    shown = on_terminal(columns, "plan", EXAMPLE)
    words = " ".join(shown.replace("│", " ").split())
    for one in document["plans"]:
        assert f"{one['data']}x{one['tensor']}x{one['pipeline']}" in shown
        for figure in (f"{one['usd']:,.2f}", f"{one['step_seconds']:,.3g}"):
            assert figure in shown, figure
        assert one["why_not"][:12] in words


def test_there_are_no_colours_in_a_pipe() -> None:
    assert "\x1b" not in in_pipe("plan", EXAMPLE)
