"""What tests and benches share: the development cluster, and what a run leaves behind."""
