"""`catj`, also `kubectl catj`: what a person asks of their jobs."""
