"""Costs of a run: seconds, memory, dollars. Pure functions and dated data."""
