"""What tests stand on, by role: the cluster as tests see it, ranks and agents as processes, and things made for a test."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""
