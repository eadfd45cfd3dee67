"""A head that several ranks hold together: its features, its parameters, its gradients."""
