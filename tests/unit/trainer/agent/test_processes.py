import os
import threading

import pytest

from cost_aware_trainer.agent.processes import Tail, last_error

VERDICT = (
    "E1121 10:00:00.000000 7 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {}) local_rank: 0 "
    "(pid: 11) of binary: /usr/bin/python3"
)


def summary(*codes):
    failures = (
        f"[{i}]:\n  rank      : {i} (local_rank: {i})\n  exitcode  : {c} (pid: 1{i})" for i, c in enumerate(codes)
    )
    return "\n".join(["=====", "Failures:", *failures, "====="]).splitlines()


@pytest.mark.parametrize(
    ("verdict", "codes", "named"),
    [
        (-15, (-15, -9), -9),
        (-15, (-15, -15, 1), 1),
        (-15, (-15,), -15),
        (-9, (-15, -9), -9),
        (1, (1, -9), -9),
        (1, (1, -11, -9), -11),
        (1, (1, -6), 1),
        (-6, (-6, 1), -6),
    ],
)
def test_a_rank_that_torchrun_itself_terminated_is_not_named_as_the_cause(verdict, codes, named):
    message = last_error(["RuntimeError: connection closed by peer", VERDICT.format(verdict), *summary(*codes)])
    assert message == f"RuntimeError: connection closed by peer\na rank exited with {named}"


def test_a_rank_that_torchrun_killed_for_not_ending_is_not_named_as_the_cause():
    forced = "W1121 10:00:00 7 api.py:1044] Unable to shutdown process 11 via Signals.SIGTERM, forcefully exiting via SIGKILL"
    message = last_error(["ValueError: no such file", forced, VERDICT.format(1), *summary(1, -9)])
    assert message.endswith("a rank exited with 1")


def test_leaks_that_modules_report_at_exit_do_not_push_the_cause_out_of_the_message():
    noise = [
        "nanobind: leaked 20 types!",
        *[f' - leaked type "torch.T{i}"' for i in range(10)],
        " - ... skipped remainder",
        "nanobind: this is likely caused by a reference counting issue in the binding code.",
        "See https://nanobind.readthedocs.io/en/latest/refleaks.html for more information",
    ]
    message = last_error(["ValueError: no such tokenizer", *noise, *noise, VERDICT.format(1)])
    assert message == "ValueError: no such tokenizer\na rank exited with 1"


def test_a_message_is_bounded():
    assert len(last_error(["x" * 3000] * 50)) <= 4000


def test_a_launch_s_message_waits_for_all_that_the_launch_wrote(capsys):
    reading, writing = os.pipe()
    with os.fdopen(reading) as stream, os.fdopen(writing, "w") as pipe:
        tail = Tail(stream, "\x1eended ")

        def write():
            pipe.write("the cause")
            pipe.write("\x1eended 4\n")
            pipe.flush()

        late = threading.Timer(0.2, write)
        late.start()
        tail.settle("4")
        assert tail.last_error() == "the cause"
        late.join()
    tail.settle()
    assert capsys.readouterr().err == "the cause"


def test_a_server_that_is_gone_is_not_waited_for():
    tail = Tail(iter(["the cause\n"]), "\x1eended ")
    tail.settle("4")
    assert tail.last_error() == "the cause"
