"""Children that end with their parent, however it ends: the kernel sends them a signal. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Asks for a signal when this process's parent dies. One that has died already is known by its id.

    The kernel looks at the thread that made this process: that thread must live as long as the parent shall.

    Raises:
        OSError: the kernel refuses, which Linux does not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
