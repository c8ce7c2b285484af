"""Search over all layouts within bounds, and the structure of what the best of them costs."""
