"""Everything else that talks: Prometheus, the ranks and agents, mounted files, the clock."""
