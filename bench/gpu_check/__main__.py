"""Starts the checks; see `bench.gpu_check.command`."""

import os
import sys

# As torchrun has it for its ranks. It counts only if it is set before the first import of a library that starts threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench.gpu_check.command import main

if __name__ == "__main__":
    sys.exit(main())
