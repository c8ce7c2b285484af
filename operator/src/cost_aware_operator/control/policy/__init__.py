"""Decisions as pure functions of what was read."""
