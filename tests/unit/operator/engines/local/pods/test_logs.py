"""A pod's log, whole and followed, while it begins anew."""

import asyncio

import pytest

from cost_aware_operator.engines.local.pods.launch import ProcessEnd
from cost_aware_operator.engines.local.pods.logs import follow_log, pod_folder, pod_log


@pytest.fixture
def folder(tmp_path):
    found = pod_folder(tmp_path, "uid-1")
    found.path.mkdir(parents=True)
    return found


def begin_anew(folder):
    """As the keeper does."""
    copy = folder.path / "log.partial"
    copy.write_bytes(folder.log.read_bytes())
    folder.log.write_bytes(b"")
    copy.replace(folder.older_log)


def test_a_log_has_what_is_kept_of_it(folder):
    assert pod_log(folder) == ""
    folder.log.write_text("one\n")
    begin_anew(folder)
    folder.log.write_text("two\n")
    assert pod_log(folder) == "one\ntwo\n"


@pytest.mark.parametrize("uid", ["", "..", "a/b", "/etc"])
def test_a_uid_names_no_other_folder(tmp_path, uid):
    with pytest.raises(ValueError, match="no uid"):
        pod_folder(tmp_path, uid)


async def test_a_log_is_followed_over_its_new_beginning_to_the_pod_s_end(folder, monkeypatch):
    monkeypatch.setattr("cost_aware_operator.engines.local.pods.logs.FOLLOW_SECONDS", 0.01)
    seen = b""

    async def follow():
        nonlocal seen
        async for piece in follow_log(folder):
            seen += piece

    def write(text):
        with folder.log.open("ab") as log:
            log.write(text)

    following = asyncio.create_task(follow())
    expected = b""
    for number in range(12):
        line = b"%d %s\n" % (number, b"x" * (50 - number))
        write(line)
        expected += line
        await asyncio.sleep(0.03 if number % 2 else 0)
        if number % 4 == 3:
            write(b"just before\n")
            expected += b"just before\n"
            begin_anew(folder)
            await asyncio.sleep(0.03)
    write(b"the end\n")
    folder.write_end(ProcessEnd(0, 1.0, 2.0))
    await asyncio.wait_for(following, 5)
    assert seen == expected + b"the end\n"
