"""The training side: a pod's agent, and the training runtime that torchrun starts on every rank."""
