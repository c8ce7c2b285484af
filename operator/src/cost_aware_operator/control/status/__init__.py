"""Status, conditions and events: what a user is told. Pure."""
