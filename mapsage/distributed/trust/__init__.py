"""Who may connect with a rank: the secret of a job, and the proof of knowing it."""
