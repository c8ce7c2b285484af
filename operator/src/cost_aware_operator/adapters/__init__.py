"""The only code that talks: to the Kubernetes API, to agents and ranks, to files, to the clock."""
