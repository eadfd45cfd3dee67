"""Dynamic sampling as a hook: `dynamic_sampling_hook.py` is where to begin."""
