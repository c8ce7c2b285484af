"""The operator: from a `CostAwareTrainingJob` to a priced, observed, distributed PyTorch training run."""
