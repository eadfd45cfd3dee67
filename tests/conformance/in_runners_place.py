"""A pytest plugin that puts MapSageRunner where MMEngine's tests import Runner from."""

import mmengine.runner
import mmengine.runner.runner
from mmengine.registry import RUNNERS

import mapsage  # noqa: F401  (registers everything of MapSage's over MMEngine's)
from mapsage.engine import MapSageRunner

mmengine.runner.Runner = MapSageRunner
mmengine.runner.runner.Runner = MapSageRunner
RUNNERS.register_module(name='Runner', module=MapSageRunner, force=True)
