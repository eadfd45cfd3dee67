"""Which operators a training step calls, where a card computes them, and whether it is right.

`recording.py` lists the operators of a step, `placement.py` tells which of them go to the CPU, and
`verdict.py` what that costs. `comparison.py` compares a card's results with the CPU's, operator by
operator; `bisection.py` finds an operator that is wrong only among the others. Needs torch 2.
"""
