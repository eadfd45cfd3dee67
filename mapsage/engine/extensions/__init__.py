"""Features of MapSageRunner, each as an extension with the moments of a run that concern it.

The order of :data:`EXTENSIONS` is the order of their effects at every moment. Where one feature
needs another, a comment says so. The moments are in ``engine/run_extension.py``, and
``engine/runner.py`` calls them. How a model is wrapped is decided in ``engine/wrapping.py``, for
all features together.
"""

from typing import Tuple, Type

from mapsage.engine.run_extension import RunExtension
from mapsage_launcher.extras import run_extensions_of_extras

from .checks import ConfigTypos, DataChecks, Determinism, ModelInputs, StartChecks, StartSummary
from .frozen_encoders import EncoderFeatures, SharedHeads
from .machines import CheckpointCopies, Nodes, StopRequests
from .resume import Resume
from .virtual_ranks import VirtualRankLoading

EXTENSIONS: Tuple[Type[RunExtension], ...] = (
    ModelInputs,
    Nodes,
    DataChecks,
    ConfigTypos,
    EncoderFeatures,
    SharedHeads,
    VirtualRankLoading,
    # Before everything that depends on the seed or on whether the run is resumed.
    Resume,
    StartChecks,
    StartSummary,
    Determinism,
    *run_extensions_of_extras(),
    StopRequests,
    # After Nodes, which learns whether the machines share a disk, and after Resume, because copies
    # of a run that starts over are removed.
    CheckpointCopies,
)

__all__ = ['EXTENSIONS']
