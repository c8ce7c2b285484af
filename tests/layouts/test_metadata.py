"""What real checkpoints hold, under every sharding, is what the reader of their metadata admits, and nothing is admitted in vain."""

import pickletools
from pathlib import Path

import pytest

from cost_aware_trainer.contract import DegreesPlan, Sharding
from cost_aware_trainer.state.metadata import SafeReader


def classes_in(content):
    """Names that a pickle asks for."""
    texts, found = [], set()
    for operation, argument, _ in pickletools.genops(content):
        if operation.name == "GLOBAL":
            found.add(tuple(argument.split(" ")))
        elif operation.name == "STACK_GLOBAL":
            found.add((texts[-2], texts[-1]))
        elif isinstance(argument, str):
            texts.append(argument)
    return found


@pytest.mark.parametrize("sharding", list(Sharding))
def test_the_metadata_of_a_checkpoint_of_every_sharding_are_read(pool, plan_of, sharding):
    plan = plan_of(DegreesPlan(data=2), sharding=sharding, steps=2)
    pool.run(2, "train", plan=plan.to_json())
    (path,) = Path(plan.checkpoint.folder).glob("step-*/.metadata")
    assert ("torch.distributed.checkpoint.metadata", "Metadata") in classes_in(path.read_bytes())
    metadata = SafeReader(path.parent).read_metadata()
    assert any(name.startswith("optimizer.") for name in metadata.state_dict_metadata)
