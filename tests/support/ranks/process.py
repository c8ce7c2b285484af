"""Runs one rank in a process of the forkserver, which has imported torch already."""

import os
import sys


def run_script(environment, path, arguments, output):
    """Runs a user's own script as torchrun would."""
    import runpy
    import traceback

    _redirect(environment, output)
    sys.argv = [path, *arguments]
    code = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def _redirect(environment, output):
    import torch

    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(environment)
    torch.set_num_threads(1)


def run(environment, arguments, output):
    _redirect(environment, output)
    if limit_bytes := environment.get("TEST_FILE_LIMIT_BYTES"):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit_bytes), int(limit_bytes)))
    from cost_aware_trainer.training.rank import main

    os._exit(main(arguments))
