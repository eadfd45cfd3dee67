"""Process groups: how they are made, staged over the host, simulated and replicated."""
