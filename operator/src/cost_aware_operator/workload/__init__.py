"""Kubernetes objects as pure functions of (job, plan, attempt)."""
