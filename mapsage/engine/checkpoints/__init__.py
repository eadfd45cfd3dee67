"""Checkpoints: how they are written, which one a run resumes, and copies on other machines.

Begin with `saving.py`, the Runner that saves, and `resume.py`, which chooses what to resume from.
"""
