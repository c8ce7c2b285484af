"""First process of a pod: takes orders over HTTP, runs torchrun once for each attempt, and stops it gracefully. Imports no torch."""
