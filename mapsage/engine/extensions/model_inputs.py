"""Changes of a plain model before it is wrapped: checks of its images, and its memory layout."""
from __future__ import annotations

from torch import nn

from mapsage.engine.loading.input_checks import watch_inputs
from mapsage.engine.run_extension import EngineRun, RunExtension
from mapsage.wrappers.memory_layout import put_channels_last


class ModelInputs(RunExtension):
    """Images that do not fit the model raise a DataError; ``env_cfg.channels_last`` is applied."""

    def prepare_model(self, run: EngineRun, model: nn.Module) -> None:
        watch_inputs(model)
        if run.env.channels_last:
            put_channels_last(model)
