"""The loop: a keyed queue, its workers, and one reconcile."""
