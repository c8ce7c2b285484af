"""An agent of a few lines: what a kubelet must be able to rely on, and a child that must not outlive it."""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

parser = argparse.ArgumentParser()
for name in ("run-folder", "memory-folder", "token-file", "termination-file", "lifeline-fd"):
    parser.add_argument(f"--{name}")
options = parser.parse_args()
volume = pathlib.Path(os.environ["VOLUME"])
name = os.environ["HOSTNAME"]
with (volume / "starts").open("a") as starts:
    starts.write(f"{name} {os.getpid()}\n")
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
ending = threading.Event()
signal.signal(signal.SIGTERM, signal.SIG_IGN if os.environ.get("STUBBORN") else lambda *_: ending.set())


def watch():
    while os.read(int(options.lifeline_fd), 100):
        pass
    if not os.environ.get("STUBBORN"):
        ending.set()


threading.Thread(target=watch, daemon=True).start()
print("hello from", name, flush=True)
(volume / f"{name}.environment").write_text("\n".join(f"{k}={v}" for k, v in sorted(os.environ.items())))
(volume / f"{name}.token").write_text(pathlib.Path(options.token_file).read_text())
while not ending.is_set() and not (volume / f"{name}.finish").exists():
    if (volume / f"{name}.talk").exists():
        print("x" * 99, flush=True)
    else:
        time.sleep(0.01)
if ending.is_set():
    time.sleep(float(os.environ.get("SAVE_SECONDS", "0.1")))
    (volume / f"{name}.saved").write_text("saved")
    print("saved", flush=True)
    sys.exit(143)
code = int((volume / f"{name}.finish").read_text())
if code == 0:
    pathlib.Path(options.termination_file).write_text("the result")
print("ending", flush=True)
child.kill()
sys.exit(code)
