"""The programs of tools/ and of the command `mapsage`: parsers, and what they start."""
