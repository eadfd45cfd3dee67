"""What the programs of tools/ call: one module a command, and the command line they share."""
