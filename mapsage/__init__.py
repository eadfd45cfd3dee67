"""MapSage: train remote-sensing segmentation on whatever cluster is at hand.

Importing it closes the gaps of the host packages and registers everything with MMEngine.
"""
from mapsage_launcher.hosts import absent_hosts

if not absent_hosts():  # without them, tools/predict.py --model still makes maps
    from . import (  # noqa: F401
        compat,  # noqa: F401  (first: it decides whether mmseg can be imported)
        datasets,
        engine,
        evaluation,
        hooks,
        models,
        wrappers,
    )
from .version import __version__  # noqa: F401
