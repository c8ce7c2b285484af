"""Training data: token files, the stores they lie in, the order of samples, and what is fetched ahead."""
