"""Nodes of a job, as ranks see them: heartbeat, the writer's lease, notes for the launcher."""
