"""How the processes of a run start."""
