"""Commands about jobs that are there, or were."""
