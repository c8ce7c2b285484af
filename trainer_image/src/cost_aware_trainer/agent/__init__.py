"""A pod's first process: takes orders over HTTP, runs torchrun once for each attempt, stops it gracefully. No torch."""
