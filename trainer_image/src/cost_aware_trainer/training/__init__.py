"""Training runtime: the bundled trainer, the session for your own model, and the parts of both."""
