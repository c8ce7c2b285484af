"""Program that ties itself to its parent and becomes another: `python -m cost_aware_trainer.agent.tether PID COMMAND…`.

The tie outlives the change of program. A function between fork and exec could set it too, but is not safe beside threads.
"""

from __future__ import annotations

import os
import signal
import sys

from cost_aware_trainer.contract.parents import end_with_parent


def main() -> None:
    """Becomes the command, which gets SIGTERM when the process of this id dies."""
    end_with_parent(int(sys.argv[1]), signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606  the agent's own command


if __name__ == "__main__":
    main()
