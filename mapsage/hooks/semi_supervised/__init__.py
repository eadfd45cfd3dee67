"""Training with unlabeled images: `fixmatch_hook.py` is where to begin."""
