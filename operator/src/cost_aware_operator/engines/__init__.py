"""Engines run jobs: one Protocol of what is asked of a cluster, and what answers it."""
