"""The training runtime: the bundled trainer, the session for your own model, and what both are made of."""
