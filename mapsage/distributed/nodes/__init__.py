"""Nodes of an elastic job: launcher, heartbeat, and the lease on the work dir."""
