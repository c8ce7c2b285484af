"""A volume without space: what can be mended is never called impossible, and a run makes room by removing its own leftovers first."""

import contextlib
import errno
import subprocess
from pathlib import Path

import pytest
from tests.support.ranks.checkpoint_cases import alone

from cost_aware_trainer.state.checkpoint import CheckpointError
from cost_aware_trainer.state.validation import InvalidRunError

ROWS = 4096
"""Rows of a state of 800 KiB."""


@pytest.fixture
def small_volume(tmp_path):
    """A file system of 2 MiB, where mounting is allowed."""
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2000k", "tmpfs", str(tmp_path)], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mount.stderr}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def filled(folder):
    """Writes to the last byte."""
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_a_restart_after_a_save_that_filled_the_volume_removes_it_and_goes_on(small_volume):
    folder = small_volume / "run"
    run = alone(folder, rows=ROWS)
    run.resume()
    run.save(1)
    half = folder / ".saving-step-00000002-attempt-0-"
    half.mkdir()
    filled(half)
    again = alone(folder, rows=ROWS)
    assert again.resume() == 1
    assert not half.exists()
    for one in (run, again):
        one.checkpointer.close()


def test_a_save_that_fails_for_space_leaves_nothing_behind_and_the_older_checkpoint(small_volume):
    folder = small_volume / "run"
    run = alone(folder, rows=ROWS)
    run.resume()
    run.save(1)
    run.save(2)
    with pytest.raises(CheckpointError, match=r"step 3 could not be written to .* MiB are free\).*No space left"):
        run.save(3)
    run.checkpointer.close()
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]
    again = alone(folder, rows=ROWS)
    assert again.resume() == 2
    again.checkpointer.close()


def test_a_full_volume_is_a_failure_that_is_tried_again_and_says_how_much_is_free(small_volume):
    filled(small_volume)
    with pytest.raises(CheckpointError, match=r"cannot be written: No space left .*\(0 MiB are free\).*make room"):
        alone(small_volume / "run", claim=("job", 1)).resume()
    (small_volume / "filler").unlink()
    assert alone(small_volume / "run", claim=("job", 2)).resume() == 0


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, CheckpointError),
        (errno.EDQUOT, CheckpointError),
        (errno.EIO, CheckpointError),
        (errno.ESTALE, CheckpointError),
        (errno.EACCES, InvalidRunError),
        (errno.EROFS, InvalidRunError),
    ],
    ids=errno.errorcode.get,
)
def test_only_what_stays_as_it_is_makes_a_run_invalid(tmp_path, monkeypatch, number, error):
    def refused(*_):
        raise OSError(number, "refused")

    monkeypatch.setattr(Path, "write_text", refused)
    with pytest.raises(error, match="cannot be written: refused"):
        alone(tmp_path / "run").resume()
