"""Batch norm with running statistics trains on an XLA device as on the CPU."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn

from mapsage.accelerator import resolve_accelerator, set_current_accelerator

pytest.importorskip('torch_xla', reason='torch_xla is not installed: the xla leg runs this')


def compare_with_the_cpu() -> None:
    """Compare outputs and gradients, in a process whose first backward pass this is."""
    import torch_xla

    set_current_accelerator(resolve_accelerator('xla'))
    torch.manual_seed(0)
    for norm, shape in ((nn.BatchNorm2d, (2, 4, 3, 5)), (nn.BatchNorm1d, (6, 4))):
        for affine in (True, False):
            for frozen in (True, False):
                here = norm(4, affine=affine)
                here.running_mean.normal_()
                here.running_var.uniform_(0.5, 2.0)
                if affine:
                    nn.init.normal_(here.weight)
                    nn.init.normal_(here.bias)
                compare(here, torch.randn(shape), frozen, torch_xla)
    module = nn.BatchNorm2d(3).to(torch_xla.device()).eval()
    images = torch.ones(1, 3, 2, 2, device=torch_xla.device(), dtype=torch.bfloat16)
    assert module(images).dtype == torch.bfloat16
    with torch.no_grad():
        assert module(images.float()).dtype == torch.float32


def compare(here: nn.Module, images: torch.Tensor, frozen: bool, torch_xla: object) -> None:
    there = copy.deepcopy(here).to(torch_xla.device())
    outcomes = []
    for module in (here.train(not frozen), there.train(not frozen)):
        inputs = images.detach().clone().to(module.running_mean.device).requires_grad_()
        output = module(inputs)
        output.pow(3).sum().backward()
        torch_xla.sync()
        # torch_xla's own running variance is the biased one, so that is compared where it stays
        statistics = [module.running_mean, module.running_var] if frozen else []
        found = [
            output,
            inputs.grad,
            *statistics,
            *(parameter.grad for parameter in module.parameters()),
        ]
        outcomes.append([each.detach().cpu() for each in found])
    for expected, got in zip(*outcomes):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_outputs_and_gradients_equal_those_of_the_cpu(tmp_path: Path) -> None:
    run_ranks(compare_with_the_cpu, 1, tmp_path)
