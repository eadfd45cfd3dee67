"""Training on features that come from a feature source: `feature_source_hook.py` is the start."""
