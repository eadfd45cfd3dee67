"""Imports everything that a rank imports until its first training step.

The launcher's fork server imports this module by its name before it forks the ranks, so that eight
ranks pay for these imports once (`mapsage_launcher/ranks/fork_server.py`). Packages that the rooms
import inside functions have to be named or triggered here.
"""

# ruff: noqa: F401
import matplotlib.pyplot
import mmengine.runner
import mmengine.visualization
import mmseg.apis
import mmseg.datasets
import mmseg.engine
import mmseg.evaluation
import mmseg.models
import mmseg.visualization
import rich.progress
import torch.profiler
from mmengine.config import Config

import mapsage.commands.cli

# The first optimizer imports torch._dynamo, and the first printed config imports yapf.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
assert Config(dict(a=1)).pretty_text
