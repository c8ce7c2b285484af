"""The control loop: a keyed queue, and one level-based reconcile per job."""
