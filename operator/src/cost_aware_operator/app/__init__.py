"""Starting the operator: settings, leadership, kopf's watches, probes. Thin."""
