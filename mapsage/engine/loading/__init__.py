"""The order, the keys and the checks of a run's data."""
