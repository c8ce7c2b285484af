"""Every rank's metrics: phases of a step, traffic, overlap, and the stages of a launch."""
