"""A checkpoint's metadata is a pickle from a shared volume: what it may do is decided here."""

import io
import pickle
import tarfile

import pytest
from tests.support import ROOT
from torch.distributed.checkpoint._async_process_executor import _AsyncCheckpointProcess
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex

from cost_aware_trainer.state.metadata import MetadataUnpickler


def read(data: bytes):
    return MetadataUnpickler(io.BytesIO(data)).load()


class Reduced:
    """Pickles as a call of what it is given."""

    def __init__(self, *call):
        self._call = call

    def __reduce__(self):
        return self._call[0], tuple(self._call[1:])


def test_records_and_enums_are_read() -> None:
    index = MetadataIndex("layers.0.weight")
    assert read(pickle.dumps([index, _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT])) == [
        index,
        _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT,
    ]


def test_enums_as_early_python_3_11_wrote_them_are_read() -> None:
    written = pickle.dumps(Reduced(getattr, _MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT"))
    assert read(written) is _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT


def test_getattr_of_anything_but_an_enum_is_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match="may not ask"):
        read(pickle.dumps(Reduced(getattr, MetadataIndex, "__init__")))


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Reduced(print, "no")),
        # protocol 4 looks dotted names up attribute by attribute: through a torch module to what it imports
        b"\x80\x04\x8c\x27torch.distributed.checkpoint.filesystem\x94\x8c\x09os.system\x94\x93\x94\x8c\x04true\x94\x85\x94R.",
    ],
)
def test_foreign_objects_are_refused(data: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError, match="may not hold"):
        read(data)


def test_no_class_of_the_package_is_admitted_that_is_not_a_record() -> None:
    """One of them starts a process when it is made."""
    for kind in (FileSystemWriter, FileSystemReader, _AsyncCheckpointProcess):
        with pytest.raises(pickle.UnpicklingError, match=f"may not hold .*{kind.__name__}"):
            read(pickle.dumps(Reduced(kind, "x")))


def test_the_metadata_of_the_version_before_is_read(tmp_path) -> None:
    with tarfile.open(ROOT / "tests/unit/trainer/golden/run.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (path,) = tmp_path.rglob(".metadata")
    assert read(path.read_bytes()).state_dict_metadata
