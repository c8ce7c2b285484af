"""Container paths as paths of the host: whole, never twice, and nothing else of a text."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cost_aware_operator.engines.local.pods.mounts import Mounts, localised
from cost_aware_trainer.contract import BatchPlan, CheckpointPlan, DegreesPlan, ModelPlan, RunOrder, RunPlan

NAMES = st.text("abc.-_", min_size=1, max_size=3).filter(lambda name: name.strip("."))
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts))
TABLES = st.dictionaries(PATHS, PATHS.map(lambda path: f"/host{path}"), min_size=1, max_size=4)
MOUNTS = Mounts({"/data": "/home/me/data", "/data/big": "/mnt/big", "/run/catj": "/s/run", "/tmp": "/s/tmp"})


@given(TABLES, PATHS)
def test_a_path_goes_with_its_longest_mount_and_only_with_that(table, path):
    above = [mount for mount in table if (path + "/").startswith(mount + "/")]
    mapped = Mounts(table).path(path)
    if above:
        longest = max(above, key=len)
        assert mapped == table[longest] + path[len(longest) :]
    else:
        assert mapped == path


@given(TABLES, PATHS)
def test_a_text_that_is_a_path_is_mapped_as_one(table, path):
    assert Mounts(table).text(path) == Mounts(table).path(path)


@given(TABLES, st.lists(PATHS, min_size=1, max_size=4), st.sampled_from(":, ;="))
def test_a_list_of_paths_is_mapped_path_by_path(table, paths, separator):
    mounts = Mounts(table)
    assert mounts.text(separator.join(paths)) == separator.join(mounts.path(path) for path in paths)


@given(TABLES, st.text("abc:= ,", max_size=20))
def test_a_text_without_a_path_stays(table, text):
    assert Mounts(table).text(text) == text


def test_what_only_looks_like_a_mount_stays():
    for text in (
        "http://host/data/x",
        "/database",
        "x/data",
        "../data/x",
        "/tmp/mine",
        "/dev/shm/x",
        "/data-2",
        "~/data",
    ):
        assert MOUNTS.text(text) == text
    assert MOUNTS.text("--out=/data/big/x") == "--out=/mnt/big/x"
    assert MOUNTS.text("/data:/data/bigger") == "/home/me/data:/home/me/data/bigger"
    assert MOUNTS.path("/tmp/x") == "/s/tmp/x"


def test_an_order_is_made_for_one_pod():
    plan = RunPlan(
        steps=1,
        model=ModelPlan(layers=1, hidden=8, heads=1, kv_heads=1, ffn=8, sequence_length=8, vocabulary=8),
        degrees=DegreesPlan(),
        batch=BatchPlan(global_samples=1, micro_samples=1),
        checkpoint=CheckpointPlan(folder="/data/big/run"),
        data_folder="/data/tokens",
    )
    order = RunOrder(
        version=2, namespace="team", job="job", attempt=1, nodes=2, ranks_per_node=1, rendezvous_host="job-0.job.team.svc",
        entry=("-m", "cost_aware_trainer", "--plan", "/run/catj/attempt-1/plan.json"), plan=plan,
    )  # fmt: skip
    made = localised(order, MOUNTS, "127.1.2.3")
    assert made.rendezvous_host == "127.1.2.3"
    assert made.entry[-1] == "/s/run/attempt-1/plan.json"
    assert (made.plan.checkpoint.folder, made.plan.data_folder) == ("/mnt/big/run", "/home/me/data/tokens")
    assert replace(made.plan, checkpoint=plan.checkpoint, data_folder=plan.data_folder) == plan
    assert localised(replace(order, plan=None), MOUNTS).rendezvous_host == order.rendezvous_host
