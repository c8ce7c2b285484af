"""Metrics of every rank: phases of a step, traffic, overlap, and the stages of a launch."""
