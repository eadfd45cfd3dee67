"""Features of MapSageRunner, each as an extension with the moments of a run that concern it.

The order of :data:`EXTENSIONS` is the order of their effects at every moment. Where one feature
needs another, a comment says so. The moments are in ``engine/run_extension.py``, and
``engine/runner.py`` calls them. How a model is wrapped is decided in ``engine/wrapping.py``, for
all features together.
"""

from typing import List, Tuple, Type

from mapsage.engine.run_extension import RunExtension
from mapsage.engine.startup import StopRequests
from mapsage_launcher.extras import run_extensions_of_extras

from .checks import ConfigTypos, DataChecks, Determinism, ModelInputs, StartChecks, StartSummary
from .fast import FastSettings
from .resume import Resume
from .virtual_ranks import VirtualRankLoading

_OF_EXTRAS: List[Type[RunExtension]] = run_extensions_of_extras()
EXTENSIONS: Tuple[Type[RunExtension], ...] = (
    *(extension for extension in _OF_EXTRAS if extension.acts_first),
    ModelInputs,
    DataChecks,
    ConfigTypos,
    VirtualRankLoading,
    # Before everything that depends on the seed or on whether the run is resumed.
    Resume,
    # After the checkpoint is chosen, which says what the run began with.
    FastSettings,
    StartChecks,
    StartSummary,
    Determinism,
    *(extension for extension in _OF_EXTRAS if not extension.acts_first),
    StopRequests,
)

__all__ = ['EXTENSIONS']
