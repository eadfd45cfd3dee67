"""Wrappers in which several ranks hold one model together, as the rest of MapSage sees them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn


class SplitModel(nn.Module):
    """Base class of a wrapper whose ranks train on the same samples and hold the model together.

    The checkpoint of such a run does not say its number of virtual ranks, and has no gradients of
    an unfinished accumulation cycle.
    """

    @property
    def samples_rank(self) -> int:
        """Number by which this process draws samples, equal on ranks that train on the same ones."""
        raise NotImplementedError

    def whole(self) -> AbstractContextManager:
        """Return a context in which every rank holds the whole model. Collective on entry."""
        raise NotImplementedError


def whole_model(model: nn.Module) -> AbstractContextManager:
    """Return a context in which ``model`` is whole on every rank. Collective for a split model.

    Args:
        model: Model or wrapped model. The context has no effect unless it is a
            :class:`SplitModel`.
    """
    return model.whole() if isinstance(model, SplitModel) else nullcontext()
