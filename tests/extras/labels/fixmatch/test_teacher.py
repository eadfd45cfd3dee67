"""The teacher follows parameters and buffers, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mapsage.extras.labels.fixmatch.teacher import Teacher, weight_of_student


def student() -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(2, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Linear(3, 2)
    )
    model[2].eval()  # as with norm_eval
    model[3].requires_grad_(False)
    model[2].requires_grad_(False)
    return model


def trained(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    model(torch.randn(5, 2))


def test_the_weights_of_the_first_steps() -> None:
    assert [weight_of_student(step, 0.996) for step in (0, 1, 3)] == [1.0, 0.5, 0.25]
    assert weight_of_student(10**6, 0.996) == pytest.approx(0.004)
    assert weight_of_student(7, 0.0) == 1.0


def test_it_is_the_average_worked_out_by_hand() -> None:
    model = student()
    teacher = Teacher(model, 0.6)
    average = {name: each.double() for name, each in model.state_dict().items()}
    for step in range(6):
        trained(model)
        teacher.follow(model, lambda buffers: buffers)
        alpha = min(1 - 1 / (step + 1), 0.6)
        for name, value in model.state_dict().items():
            average[name] = (
                value.double()
                if 'num_batches' in name
                else alpha * average[name] + (1 - alpha) * value.double()
            )
    assert teacher.steps == 6
    for name, value in teacher.module.state_dict().items():
        assert torch.allclose(value.double(), average[name], atol=1e-6), name
    assert not any(each.requires_grad for each in teacher.module.parameters())
    assert not any(each.training for each in teacher.module)
    # What cannot move does not drift by roundings either.
    names = set(teacher.averaged_names(model))
    assert {'0.weight', '1.running_mean', '1.num_batches_tracked'} <= names
    assert not any(name.startswith(('2.', '3.')) for name in names)


def test_it_follows_the_buffers_that_it_is_given() -> None:
    model = student()
    teacher = Teacher(model, 0.9)
    teacher.follow(model, lambda buffers: [torch.full_like(each, 7) for each in buffers])
    assert (teacher.module[1].running_mean == 7).all()
    assert (teacher.module[1].num_batches_tracked == 7).all()


def test_an_exchange_and_its_return_leave_the_bits() -> None:
    model = student()
    teacher = Teacher(model, 0.9)
    for _ in range(3):
        trained(model)
        teacher.follow(model, lambda buffers: buffers)
    mine, its = (
        {name: each.clone() for name, each in module.state_dict().items()}
        for module in (model, teacher.module)
    )
    parameter = model[0].weight
    teacher.exchange(model)
    assert torch.equal(model.state_dict()['1.running_var'], its['1.running_var'])
    assert model[0].weight is parameter and not torch.equal(its['0.weight'], mine['0.weight'])
    teacher.exchange(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, mine[name])
        assert torch.equal(teacher.module.state_dict()[name], its[name])


def test_a_shared_module_is_the_same_object() -> None:
    model = student()
    teacher = Teacher(model, 0.9, [model[3]])
    assert teacher.module[3] is model[3] and teacher.module[0] is not model[0]
    assert model[3].training
