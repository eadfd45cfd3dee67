"""The fast settings of a card: channels last, and fused optimizers.

A config that says nothing gets them on an accelerator with ``fast_by_default``. They change the
last bits of a run, so a resumed run keeps what it began with, and deterministic runs go without
them. Batches come from pinned memory there anyway, see ``engine/loading/build.py``.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import nn

from mapsage.distributed.wrappers.memory_layout import put_channels_last
from mapsage.engine.run_extension import EngineRun, RunExtension


def is_fast(run: EngineRun) -> bool:
    """Return whether a run gets the fast settings."""
    if (
        run.env.fast is False
        or not run.accelerator.fast_by_default
        or run._randomness_cfg.get('deterministic')
    ):
        return False
    resumed = run.resume_choice
    if run.env.fast is None and resumed is not None and resumed.path is not None:
        return resumed.fast
    return True


def is_convolutional(model: nn.Module) -> bool:
    """Return whether convolutions of a model mix channels, and not only cut an image in patches."""
    return any(
        isinstance(module, nn.Conv2d)
        and module.groups == 1
        and tuple(module.kernel_size) != tuple(module.stride)
        for module in model.modules()
    )


class FastSettings(RunExtension):
    """Applies the fast settings, or ``env_cfg.channels_last`` alone, and says which in one line."""

    _channels_last = False

    def prepare_model(self, run: EngineRun, model: nn.Module) -> None:
        run.fast = is_fast(run)
        wanted = run.env.channels_last
        if wanted is None and run.fast and is_convolutional(model):
            wanted = self._channels_last = not any(
                extension.fixes_layout(run.cfg) for extension in run.extensions
            )
        if wanted:
            put_channels_last(model)

    @contextmanager
    def training(self, run: EngineRun) -> Iterator[None]:
        # The checkpoint may have been chosen since.
        run.fast = is_fast(run)
        yield

    def after_load(self, run: EngineRun) -> None:
        wrapper = run.optim_wrapper
        if not run.fast or not isinstance(wrapper, (OptimWrapper, OptimWrapperDict)):
            return
        wrappers = (
            wrapper.optim_wrappers.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]
        )
        chosen = ['channels last'] if self._channels_last else []
        chosen += [
            f'fused {type(wrapper.optimizer).__name__}'
            for wrapper in wrappers
            if wrapper.optimizer.defaults.get('fused')
        ]
        run.logger.info(
            f'fast on {run.accelerator.name}: {", ".join(chosen) or "nothing to change"}; last bits '
            f"may differ from the host's. env_cfg.fast=False or randomness.deterministic=True turn "
            f'it off.'
        )
