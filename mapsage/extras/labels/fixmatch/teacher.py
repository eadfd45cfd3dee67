"""The teacher of FixMatch: a moving average of the trained model.

Only tensors that training changes are averaged and saved; a frozen backbone is shared with the
student instead of copied. On several ranks, all teachers follow the buffers of one rank, so they
stay equal without any broadcast of the average.
"""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List, Sequence

import torch
from torch import nn


def weight_of_student(steps: int, momentum: float) -> float:
    """Return the student's weight in the average after step ``steps``, counted from 0.

    It is ``1 - min(1 - 1 / (steps + 1), momentum)``: at first the teacher is the mean over all
    steps, as in UniMatch V2, Yang et al. 2024, https://arxiv.org/abs/2410.10777.
    """
    return max(1 / (steps + 1), 1 - momentum)


class Teacher:
    """A copy of a model in evaluation mode that follows the model step by step.

    Trained parameters and the buffers of modules in training mode, such as BatchNorm statistics,
    become ``teacher + (student - teacher) * weight``. Integer buffers are copied. All other tensors
    are equal in student and teacher and stay so.

    Args:
        student: Trained model, in training mode.
        momentum: Largest share of the teacher that a step keeps, 0 to 1.
        shared: Modules of the student that never change, which the teacher uses without a copy.

    Attributes:
        module: The teacher's model.
        steps: Number of steps that the teacher has followed.
    """

    def __init__(
        self, student: nn.Module, momentum: float, shared: Sequence[nn.Module] = ()
    ) -> None:
        self.momentum, self.steps = momentum, 0
        # The memo makes deepcopy reuse the shared modules.
        self.module: Any = copy.deepcopy(student, {id(module): module for module in shared})
        shared_modules = {id(module) for root in shared for module in root.modules()}
        for module in self.module.modules():
            if id(module) not in shared_modules:
                module.training = False
        for parameter in self.module.parameters():
            parameter.requires_grad_(False)
        self._shared = tuple(shared)
        # An ordered set of names.
        self._averaged_names: Dict[str, None] = {}
        self.averaged_names(student)

    def averaged_names(self, student: nn.Module) -> List[str]:
        """Return the names of the tensors in which student and teacher may differ."""
        shared_tensors = {
            id(tensor)
            for module in self._shared
            for tensor in (*module.parameters(), *module.buffers())
        }
        parameters = [
            name for name, parameter in student.named_parameters() if parameter.requires_grad
        ]
        buffers = [
            f'{path}.{name}' if path else name
            for path, module in student.named_modules()
            if module.training
            for name, buffer in module._buffers.items()
            if buffer is not None
            and id(buffer) not in shared_tensors
            and name not in module._non_persistent_buffers_set
        ]
        # Names are never removed: a parameter that was trained for a while and then frozen still
        # differs.
        self._averaged_names.update(dict.fromkeys((*parameters, *buffers)))
        return list(self._averaged_names)

    @torch.no_grad()
    def follow(
        self, student: nn.Module, shared_buffers: Callable[[List[torch.Tensor]], List[torch.Tensor]]
    ) -> None:
        """Move the teacher by one step.

        Args:
            student: Trained model.
            shared_buffers: Function from this process's buffers to the buffers of one rank, the
                same on all ranks, so that the teachers of all ranks stay equal.
        """
        averages, current = self._tensors(self.module), self._tensors(student)
        names = self.averaged_names(student)
        parameters = dict(student.named_parameters())
        buffers = [name for name in names if name not in parameters]
        buffers_to_follow = dict(zip(buffers, shared_buffers([current[name] for name in buffers])))
        for name in names:
            value, average = buffers_to_follow.get(name, current[name]), averages[name]
            if average.is_floating_point():
                average.lerp_(value.detach(), self._weight(average))
            else:
                average.copy_(value)
        self.steps += 1

    @torch.no_grad()
    def exchange(self, student: nn.Module) -> None:
        """Swap the weights of student and teacher."""
        averages, current = self._tensors(self.module), self._tensors(student)
        for name in self.averaged_names(student):
            student_value = current[name].detach().clone()
            current[name].copy_(averages[name])
            averages[name].copy_(student_value)

    def state(self, student: nn.Module) -> Dict[str, torch.Tensor]:
        """Return the teacher's tensors that may differ from the student's, by name."""
        averages = self._tensors(self.module)
        return {name: averages[name].detach() for name in self.averaged_names(student)}

    @torch.no_grad()
    def load(self, state: Dict[str, torch.Tensor], steps: int) -> None:
        """Load a :meth:`state` of an earlier run.

        Raises:
            KeyError: If the model has no tensor with a name of the state.
        """
        averages = self._tensors(self.module)
        for name, value in state.items():
            averages[name].copy_(value)
            self._averaged_names[name] = None
        self.steps = steps

    def _weight(self, like: torch.Tensor) -> torch.Tensor:
        """Return the student's weight as a tensor, (), with the dtype and device of ``like``."""
        # XLA compiles a new graph for every new Python number, but not for a new tensor value.
        value = weight_of_student(self.steps, self.momentum)
        return torch.full((), value, dtype=like.dtype).to(like.device)

    @staticmethod
    def _tensors(module: nn.Module) -> Dict[str, torch.Tensor]:
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}
