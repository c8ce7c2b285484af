"""Runs one rank in a process of the forkserver, which has imported torch already."""

import os
import sys


def run(environment, arguments, output):
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(environment)
    if limit_bytes := environment.get("TEST_FILE_LIMIT_BYTES"):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit_bytes), int(limit_bytes)))
    import torch

    torch.set_num_threads(1)
    from cost_aware_trainer.__main__ import main

    os._exit(main(arguments))
