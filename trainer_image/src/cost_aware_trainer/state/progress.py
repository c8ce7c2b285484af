"""Progress of a run, for the bundled trainer and for sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from cost_aware_trainer.data.samples import add_checksums, checksum_text
from cost_aware_trainer.state.manifests import CheckpointManifest


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run up to its last completed step."""

    step: int = 0
    """Last completed step; 0 before the first."""
    checksum: int = 0
    """Order-free hash of all samples trained until then; see `samples.checksum`."""
    loss: float | None = None
    """Mean training loss of that step, nats per token; None before the first."""

    @classmethod
    def saved_in(cls, manifest: CheckpointManifest) -> Self:
        """Reads the progress that a checkpoint holds."""
        return cls(manifest.step, int(manifest.samples_checksum, 16), manifest.loss)

    def advanced(self, checksum: int, loss: float) -> RunProgress:
        """Progress after one more step, whose samples have this checksum."""
        return RunProgress(self.step + 1, add_checksums(self.checksum, checksum), loss)

    @property
    def samples_checksum(self) -> str:
        """The checksum as it stands in results and manifests."""
        return checksum_text(self.checksum)
