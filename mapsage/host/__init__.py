"""MMEngine's runner, loops and hooks as MapSage's own parts see them.

Hooks of several rooms, and the engine, meet here: the typed view of a runner (`runner.py`), the
base class of our hooks (`hook.py`), stages between a loop and its loader (`loop_stage.py`), and
what hooks ask of optimizers, batches and segmentors.
"""
from .hook import MapSageHook

__all__ = ['MapSageHook']
