"""Which operators a training step calls, where a card computes them, and whether it is right.

`recording.py` lists the operators of a step, `placement.py` tells which of them go to the CPU, and
`verdict.py` what that costs. It needs torch 2.
"""
