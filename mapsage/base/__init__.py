"""What every room may use: errors, files, locks, the terminal, threads. It imports nothing of ours."""
