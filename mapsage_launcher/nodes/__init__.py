"""Other machines of a job: how they meet, who takes part, and who is lost."""
