"""Which gradient was the first to be NaN or infinite on this rank, known without waiting for it.

Sums of some gradients are stored on the device before they are averaged over the ranks, and read
only once something is wrong: reading them in each step would make the host wait for the device.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional

import torch
from torch import nn

# A gradient that is not finite makes the gradients of all earlier layers so, too. So a few
# parameters, spread over the model, show as much as all. A sum costs a card's host 30 microseconds
# of a step, so 16 of them were 3 % of a small model's step.
_WATCHED = 6
# Number of iterations whose sums are stored: more than an accumulation cycle.
_REMEMBERED = 64


class BadGradient(NamedTuple):
    """A gradient that was not finite.

    Attributes:
        iteration: Iteration, counted from 0.
        name: Parameter; of the watched ones, the last in the order of the model.
        images: Paths passed to :meth:`GradientWatch.begin` for the iteration.
        rank_name: Name of the rank passed there.
    """

    iteration: int
    name: str
    images: List[str]
    rank_name: str


class _Step(NamedTuple):
    """An iteration of one virtual rank.

    Attributes:
        iteration: Iteration, counted from 0.
        images: Paths of its images.
        rank_name: Name of the virtual rank.
        sums: 0-dimensional sums of gradients, by name of the parameter. A sum of finite gradients
            is finite.
    """

    iteration: int
    images: List[str]
    rank_name: str
    sums: Dict[str, torch.Tensor]


class GradientWatch:
    """Stores sums of some gradients from before they are averaged over the ranks.

    After the averaging all ranks have the NaN of one rank. The sums stay on the device and are read
    only once something is wrong, so that a healthy step waits neither for the device nor for a
    rank.
    """

    def __init__(self) -> None:
        # One entry for each virtual rank and iteration.
        self._steps: Deque[_Step] = deque(maxlen=_REMEMBERED)
        self._handles: List[Any] = []

    def attach(self, model: nn.Module, ranks: int = 1) -> None:
        """Watch up to 6 trained parameters of ``model``, for ``ranks`` virtual ranks."""
        self._steps = deque(self._steps, maxlen=_REMEMBERED * ranks)
        trained = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        last = len(trained) - 1
        positions = {round(number * last / (_WATCHED - 1)) for number in range(_WATCHED)}
        for position in sorted(positions) if trained else ():
            name, parameter = trained[position]
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            self._handles.append(parameter.register_hook(self._make_reader(name, dtype)))

    def detach(self) -> None:
        """Stop watching parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def begin(self, iteration: int, images: List[str], rank_name: str) -> None:
        """Begin an iteration of a virtual rank.

        Args:
            iteration: Iteration, counted from 0.
            images: Paths of the images that it trains on, for the error.
            rank_name: Name of the rank, for the error.
        """
        self._steps.append(_Step(iteration, images, rank_name, {}))

    def first_bad(self) -> Optional[BadGradient]:
        """Return the first bad gradient since which no iteration was good; None if the last was.

        A bad iteration before a good one is not reported: a loss scaler skipped its step.
        """
        first = None
        for _, group in itertools.groupby(reversed(self._steps), lambda step: step.iteration):
            steps = [step for step in group if step.sums]
            # The backward pass reaches the last parameter of the model first.
            bad = [
                BadGradient(step.iteration, name, step.images, step.rank_name)
                for step in reversed(steps)
                for name, total in step.sums.items()
                if not bool(total.isfinite())
            ]
            if steps and not bad:
                break
            if bad:
                first = bad[0]
        return first

    def images_of(self, iteration: int) -> List[str]:
        """Return the images of an iteration; empty for an iteration that is no longer stored."""
        return [
            image for step in self._steps if step.iteration == iteration for image in step.images
        ]

    def _make_reader(self, name: str, dtype: torch.dtype) -> Callable[[torch.Tensor], None]:
        def read(gradient: torch.Tensor) -> None:
            # Gradients of a head that is split over ranks have another type: their sum would be
            # a collective.
            is_local = type(gradient) in (torch.Tensor, nn.Parameter)
            if self._steps and is_local and gradient.layout == torch.strided:
                self._steps[-1].sums[name] = gradient.detach().sum(dtype=dtype)

        return read
