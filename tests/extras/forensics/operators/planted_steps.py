"""A small training step on a simulated card, for tests that plant wrong kernels in it."""

from __future__ import annotations

import sys
from typing import Dict

import torch
from support import ROOT
from torch import nn
from torch.nn import functional

from mapsage.extras.simulator.accelerator import SimAccelerator

sys.path.append(str(ROOT / 'tools' / 'benchmarks'))


class SmallStep:
    """Loss and gradients of a convolution, BatchNorm, attention by products, and dropout."""

    def __init__(self) -> None:
        self.accelerator = SimAccelerator()
        torch.manual_seed(0)
        self._model = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.BatchNorm2d(8),
            nn.ReLU6(),
            nn.Conv2d(8, 8, 3, 1, 1),
            nn.BatchNorm2d(8),
            nn.ReLU6(),
            nn.Dropout(0.2),
            nn.Conv2d(8, 4, 1),
        ).to('gcu:0')
        self._image = torch.randn(2, 3, 32, 32)
        self._labels = torch.randint(0, 4, (2, 16, 16))

    def gradients(self) -> Dict[str, torch.Tensor]:
        self.accelerator.seed(0)
        self._model.zero_grad(set_to_none=True)
        logits = self._model(self._image.to('gcu:0'))
        logits = logits + logits.softmax(1).gt(logits.mean()).float()
        loss = functional.cross_entropy(logits, self._labels.to('gcu:0'))
        loss.backward()
        return {
            'loss': loss.detach(),
            **{name: parameter.grad for name, parameter in self._model.named_parameters()},
        }
