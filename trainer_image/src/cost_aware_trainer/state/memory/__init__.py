"""Copies of a run's state in the memory of its nodes."""
