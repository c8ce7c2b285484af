"""The Kubernetes API server as an engine."""
