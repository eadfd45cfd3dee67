"""Tuning by rewards of drawn label maps: `group_reward_tuning.py` is where to begin."""
