"""Which gradient was the first to be NaN or infinite on this rank, known without waiting for it."""
from __future__ import annotations

import itertools
from collections import deque
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional

import torch
from torch import nn

# A gradient that is not finite makes those of the layers before it so, too. Some parameters,
# spread over the model, therefore tell as much as all, and cost one small sum each.
_WATCHED = 16
_REMEMBERED = 64  # iterations; more than an accumulation cycle


class BadGradient(NamedTuple):
    """A gradient that was not finite.

    Attributes:
        iteration: Iteration, counted from 0.
        name: Parameter; of the watched ones, the last in the order of the model.
        images: What :meth:`GradientWatch.begin` was given for the iteration.
        whose: What it was given as the rank.
    """

    iteration: int
    name: str
    images: List[str]
    whose: str


class _Step(NamedTuple):
    iteration: int
    images: List[str]
    whose: str
    sums: Dict[str, torch.Tensor]  # 0-dim, by name of the parameter; finite if the gradient is


class GradientWatch:
    """Remembers the sums of some gradients as they are before they are averaged over the ranks.

    After the averaging all ranks have the NaN of one. The sums stay on the device and are read only
    once something is wrong, so that a healthy step neither waits for the device nor for a rank.
    """

    def __init__(self) -> None:
        self._steps: Deque[_Step] = deque(maxlen=_REMEMBERED)  # one for each virtual rank
        self._handles: List[Any] = []

    def attach(self, model: nn.Module, ranks: int = 1) -> None:
        """Watch up to 16 trained parameters of ``model``, for ``ranks`` virtual ranks."""
        self._steps = deque(self._steps, maxlen=_REMEMBERED * ranks)
        trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        last = len(trained) - 1
        places = {round(number * last / (_WATCHED - 1)) for number in range(_WATCHED)}
        for place in sorted(places) if trained else ():
            name, parameter = trained[place]
            self._handles.append(parameter.register_hook(self._reader(name)))

    def detach(self) -> None:
        """Watch no parameter any more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def begin(self, iteration: int, images: List[str], whose: str) -> None:
        """Count what follows as ``iteration``, which trains on ``images``.

        Args:
            iteration: Iteration, counted from 0.
            images: Paths for the error.
            whose: Rank for the error; an iteration has one beginning for each virtual rank.
        """
        self._steps.append(_Step(iteration, images, whose, {}))

    def first_bad(self) -> Optional[BadGradient]:
        """Return where the gradients stopped to be finite, if they have not been since.

        A single bad step that others followed is none: a loss scaler has skipped it.
        """
        found = None
        for _, group in itertools.groupby(reversed(self._steps), lambda step: step.iteration):
            steps = [step for step in group if step.sums]
            # The backward pass comes to the last parameter of the model first.
            bad = [BadGradient(step.iteration, name, step.images, step.whose)
                   for step in reversed(steps) for name, total in step.sums.items()
                   if not bool(total.isfinite())]
            if steps and not bad:
                break
            if bad:
                found = bad[0]
        return found

    def images_of(self, iteration: int) -> List[str]:
        """Return the images of an iteration, none if it is too long ago."""
        return [image for step in self._steps if step.iteration == iteration
                for image in step.images]

    def _reader(self, name: str) -> Callable[[torch.Tensor], None]:
        def read(gradient: torch.Tensor) -> None:
            # Those of a head that is split over ranks are of another type: their sum is collective.
            plain = type(gradient) in (torch.Tensor, nn.Parameter)
            if self._steps and plain and gradient.layout == torch.strided:
                self._steps[-1].sums[name] = gradient.detach().sum(
                    dtype=torch.promote_types(gradient.dtype, torch.float32))

        return read
