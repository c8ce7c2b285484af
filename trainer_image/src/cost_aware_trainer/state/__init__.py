"""State of a run: as tensors by name, in checkpoints, in the nodes' memory, and on its way between layouts."""
