"""MMEngine's runner, loops and hooks as MapSage's own parts see them.

Hooks of several rooms, and the engine, meet here: the typed view of a runner (`runner.py`), the
base class of our hooks (`hook.py`), stages between a loop and its loader (`loop_stage.py`), and
what hooks ask of datasets, optimizers, batches, metrics and segmentors. These may be a user's and
lack what MMEngine's have, so the questions whether they have it are here.
"""

from .hook import MapSageHook

__all__ = ['MapSageHook']
