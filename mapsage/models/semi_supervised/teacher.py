"""The teacher: a moving average of the model that is trained."""
from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List, Sequence

import torch
from torch import nn


def weight_of_student(steps: int, momentum: float) -> float:
    """Return how much of the student goes into the teacher behind step ``steps`` (from 0). Pure.

    It is ``1 - min(1 - 1 / (steps + 1), momentum)``: the mean of all steps at first, as in
    UniMatch V2, Yang et al. 2024, https://arxiv.org/abs/2410.10777.
    """
    return max(1 / (steps + 1), 1 - momentum)


class Teacher:
    """A copy of a model, in evaluation mode, that follows it step by step.

    Trained parameters, and the buffers of modules in training mode such as the statistics of
    BatchNorm, move by ``teacher + (student - teacher) * weight``; whole numbers among the buffers
    are copied. All else is equal in both and does not move.

    Args:
        student: Model that is trained, in training mode.
        momentum: Most of the teacher that a step keeps, 0 to 1.
        shared: Modules of the student that the teacher has too, as they never change.

    Attributes:
        module: The teacher.
        steps: Number of steps that it has followed.
    """

    def __init__(self, student: nn.Module, momentum: float, shared: Sequence[nn.Module] = ()
                 ) -> None:
        self.momentum, self.steps = momentum, 0
        self.module: Any = copy.deepcopy(student, {id(each): each for each in shared})
        kept = {id(each) for module in shared for each in module.modules()}
        for module in self.module.modules():
            if id(module) not in kept:
                module.training = False
        for parameter in self.module.parameters():
            parameter.requires_grad_(False)
        self._shared = tuple(shared)
        self._moved: Dict[str, None] = {}
        self.names(student)

    def names(self, student: nn.Module) -> List[str]:
        """Return the names, as in a state dict, of all in which student and teacher may differ."""
        kept = {id(each) for module in self._shared
                for each in (*module.parameters(), *module.buffers())}
        trained = [name for name, each in student.named_parameters() if each.requires_grad]
        moving = [f'{path}.{name}' if path else name
                  for path, module in student.named_modules() if module.training
                  for name, buffer in module._buffers.items()
                  if buffer is not None and id(buffer) not in kept
                  and name not in module._non_persistent_buffers_set]
        # A parameter that was trained for a while differs from then on.
        self._moved.update(dict.fromkeys((*trained, *moving)))
        return list(self._moved)

    @torch.no_grad()
    def follow(self, student: nn.Module,
               shared_buffers: Callable[[List[torch.Tensor]], List[torch.Tensor]]) -> None:
        """Move the teacher by one step.

        Args:
            student: Model that is trained.
            shared_buffers: Function that returns the buffers to follow, given those of this
                process: those of one rank for all, so that the teachers of all ranks are equal.
        """
        mine, theirs = self._tensors(self.module), self._tensors(student)
        names = self.names(student)
        parameters = dict(student.named_parameters())
        buffers = [name for name in names if name not in parameters]
        followed = dict(zip(buffers, shared_buffers([theirs[name] for name in buffers])))
        for name in names:
            value, average = followed.get(name, theirs[name]), mine[name]
            if average.is_floating_point():
                average.lerp_(value.detach(), self._weight(average))
            else:
                average.copy_(value)
        self.steps += 1

    @torch.no_grad()
    def exchange(self, student: nn.Module) -> None:
        """Give the student's weights to the teacher and the teacher's to the student."""
        mine, theirs = self._tensors(self.module), self._tensors(student)
        for name in self.names(student):
            held = theirs[name].detach().clone()
            theirs[name].copy_(mine[name])
            mine[name].copy_(held)

    def state(self, student: nn.Module) -> Dict[str, torch.Tensor]:
        """Return what of the teacher may differ from the student, by name."""
        mine = self._tensors(self.module)
        return {name: mine[name].detach() for name in self.names(student)}

    @torch.no_grad()
    def load(self, state: Dict[str, torch.Tensor], steps: int) -> None:
        """Take a :meth:`state` of an earlier run.

        Raises:
            KeyError: If the model has no tensor of a name.
        """
        mine = self._tensors(self.module)
        for name, value in state.items():
            mine[name].copy_(value)
            self._moved[name] = None
        self.steps = steps

    def _weight(self, like: torch.Tensor) -> torch.Tensor:
        """Return the weight of the student as a tensor: a new number would be a new graph on XLA.
        """
        value = weight_of_student(self.steps, self.momentum)
        return torch.full((), value, dtype=like.dtype).to(like.device)

    @staticmethod
    def _tensors(module: nn.Module) -> Dict[str, torch.Tensor]:
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}
