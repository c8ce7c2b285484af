"""Everything that one reconcile knows, read once: objects, agents, metrics, the stored record."""
