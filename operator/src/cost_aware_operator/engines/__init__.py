"""Where jobs run: one protocol, and an implementation for each kind of place."""
