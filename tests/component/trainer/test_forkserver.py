"""What is imported before the fork leaves GPUs alone: a copy of a process that has asked for one could not use it."""

import subprocess
import sys

LOOKED_AT = """
import importlib, torch
from cost_aware_trainer.forkserver import PRELOADED

asked = []

def noted(module, name):
    def instead(*_, **__):
        asked.append(name)
        raise RuntimeError(name)
    assert hasattr(module, name), name
    setattr(module, name, instead)

for name in ("_cuda_getDeviceCount", "_cuda_init"):
    # a PyTorch without CUDA has neither
    if torch.version.cuda:
        noted(torch._C, name)
noted(torch.cuda, "_lazy_init")
for name in PRELOADED:
    importlib.import_module(name)
{also}
print(asked)
"""


def asked(also=""):
    program = LOOKED_AT.format(also=also)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    return done.stdout.strip(), done.stderr


def test_no_module_that_is_imported_before_the_fork_asks_for_a_device():
    said, errors = asked()
    assert said == "[]", errors


def test_a_module_that_asked_for_a_device_would_be_noticed():
    said, _ = asked(also="try: torch.zeros(1, device='cuda')\nexcept RuntimeError: pass")
    assert "_lazy_init" in said or "_cuda_init" in said
