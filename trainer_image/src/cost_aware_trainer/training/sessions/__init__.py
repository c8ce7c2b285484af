"""Sessions: a user's own model and loop under the run's checkpoints, sums and metrics."""
