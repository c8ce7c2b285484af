"""Whether a running job should go on under another plan: a chain of checks over one input, each with its reason. Pure."""
