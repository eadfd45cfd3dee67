"""Few labels: masks from a model's own predictions, and which windows to label next."""
