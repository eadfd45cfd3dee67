"""The start of a rank, and the ranks that only encode.

`startup.py` has the steps that every process takes; `encoder_rank.py` replaces the Runner on a rank
that encodes. How many ranks there are and how they are forked is in `mapsage_launcher/ranks/`.
"""
