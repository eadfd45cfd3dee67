"""Training with unlabeled images as hooks."""
