"""Metadata of torch.distributed.checkpoint, which are a pickle on a shared volume: read without running what is in them."""

from __future__ import annotations

import enum
import io
import pickle  # only for its Unpickler, restricted below
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta


def _enum_member(enumeration: type, name: str) -> enum.Enum:
    """Takes the place of `getattr` in a pickle of an enum: Python 3.11.0 to 3.11.3 wrote members with it, other versions do not."""
    if not (isinstance(enumeration, type) and issubclass(enumeration, enum.Enum)):
        raise pickle.UnpicklingError(f"checkpoint metadata may not ask {enumeration!r} for {name!r}")
    return enumeration[name]


class MetadataUnpickler(pickle.Unpickler):
    """Unpickler of DCP's `.metadata` that admits the records that DCP writes into it, each by its name, and nothing else."""

    _NAMES = frozenset(
        {
            ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
            ("torch", "Size"),
            ("torch._utils", "_get_dtype"),
            ("torch.serialization", "_get_layout"),
            ("torch.storage", "_get_dtype_from_pickle_storage_type"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            *(
                ("torch.distributed.checkpoint.metadata", name)
                for name in (
                    "BytesStorageMetadata",
                    "ChunkStorageMetadata",
                    "Metadata",
                    "MetadataIndex",
                    "StorageMeta",
                    "TensorProperties",
                    "TensorStorageMetadata",
                    "_MEM_FORMAT_ENCODING",
                )
            ),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """A record of DCP or a type that its records hold; anything else is refused.

        Raises:
            pickle.UnpicklingError: the metadata asks for something else.
        """
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout)
        if is_dtype or (module, name) in self._NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"checkpoint metadata may not hold {module}.{name}")


class SafeReader(FileSystemReader):
    """Reader that never runs code from a checkpoint: torch reads tensors weights-only, metadata is read here."""

    def read_metadata(self, *arguments: Any, **keywords: Any) -> Metadata:
        """Reads the checkpoint's metadata; raises pickle.UnpicklingError if it holds foreign objects."""
        metadata: Metadata = MetadataUnpickler(io.BytesIO((Path(self.path) / ".metadata").read_bytes())).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
