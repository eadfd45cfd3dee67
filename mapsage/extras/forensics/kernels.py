"""`mapsage operators CONFIG --compare`: which kernels of a card are wrong, by name.

One training step of the config is computed on the card, and every operator is compared with the
CPU's. If all are right, the step runs once more without interruption, and an operator that is wrong
only among the others is found by bisection.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Callable, Dict, List, Optional

import torch
from mmengine.config import Config

from mapsage.accelerator import Accelerator, AcceleratorError
from mapsage.commands.cli import build_model, read_config
from mapsage.distributed.wrappers import place_module
from mapsage.extras.forensics.operators.bisection import Bisection
from mapsage.extras.forensics.operators.comparison import ComparedOperator, OperatorComparison
from mapsage.extras.forensics.operators.dispatch import require_dispatch_mode

from .operator_report import accelerator_of, without_weights
from .synthetic_step import IMAGES, SyntheticStep, build_step


def compare_kernels(args: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Compare the operators of a training step on the card with the CPU's; return the status.

    Args:
        args: Options of `list_operators.py`.
        say: Prints a text.

    Raises:
        OperatorError: If torch cannot show the operators.
        ConfigError: If the config cannot be read or its model not be built.
        AcceleratorError: If there is no card to compare.
    """
    require_dispatch_mode()
    cfg = read_config(args)
    accelerator = accelerator_of(cfg)
    if accelerator.device_type == 'cpu' or accelerator.lazy:
        raise AcceleratorError(
            f'--compare compares the kernels of a card with those of the CPU, and the accelerator '
            f'is {accelerator.name!r}. Give --accelerator with a card that computes each operator '
            f'when it is called: cuda, gcu or sim.'
        )
    step = card_step(cfg, accelerator, args.crop_size)
    height, width = step.crop
    say(
        f'comparison of {accelerator.describe()} with the CPU: a training step of {args.config} '
        f'with {IMAGES} images of {height} x {width}'
    )
    comparison = compare_step(step, accelerator)
    for line in _table(comparison.operators):
        say(line)
    if comparison.not_compared:
        say(
            f'not compared, since the CPU cannot compute them: '
            f'{", ".join(sorted(comparison.not_compared))}'
        )
    if comparison.wrong:
        for name, operator in comparison.wrong.items():
            say(
                f'wrong: {name}, {operator.wrong_calls} of {operator.calls} calls, first call '
                f'{operator.first_wrong} with shapes {operator.shapes}: {operator.worst.text}'
            )
        say(
            f'result: {len(comparison.wrong)} operator(s) of this card are wrong: '
            f'{", ".join(comparison.wrong)}'
        )
        return 1
    return _search_sequence(step, accelerator, len(comparison.operators), say)


def card_step(cfg: Config, accelerator: Accelerator, crop: Optional[int]) -> SyntheticStep:
    """Return a step of a config's model with random weights on the accelerator's first device."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # The run shows these warnings.
        warnings.simplefilter('ignore')
        torch.manual_seed(0)
        model = build_model(without_weights(cfg))
        accelerator.set_device(0)
        step = build_step(cfg, place_module(model, accelerator, 0), crop, accelerator.amp_dtype)
        step.make_optimizer_state()
    return step


def compare_step(step: SyntheticStep, accelerator: Accelerator) -> OperatorComparison:
    """Carry out a training step and compare each of its operators with the CPU's."""
    comparison = OperatorComparison(
        accelerator.device_type,
        accelerator.synchronize,
        float64_as_float32=not accelerator.supports.float64,
    )
    train = step.train()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        with comparison:
            train()
    return comparison


def bisect_step(step: SyntheticStep, accelerator: Accelerator) -> Bisection:
    """Return a search over the step's gradients; every run begins with the same state."""
    buffers = {name: buffer.clone() for name, buffer in step.model.named_buffers()}

    def run() -> Dict[str, torch.Tensor]:
        with torch.no_grad():
            for name, buffer in step.model.named_buffers():
                buffer.copy_(buffers[name])
        accelerator.seed(0)
        return step.gradients()

    return Bisection(run, accelerator.synchronize)


def _search_sequence(
    step: SyntheticStep, accelerator: Accelerator, operators: int, say: Callable[[str], None]
) -> int:
    """Compare the whole step; name the operator that is wrong only in it; return the status."""
    bisection = bisect_step(step, accelerator)
    wrong = bisection.whole_step()
    if not wrong:
        say(
            f'result: all {operators} operators are right within their bounds, and so are the '
            f'loss and the gradients of the whole step'
        )
        return 0
    say(
        f'every operator compared by itself is right, and the whole step is wrong: '
        f'{len(wrong)} gradients, such as {wrong[0]}'
    )
    culprit = bisection.find()
    reads = f', which reads results of {", ".join(culprit.sources)}' if culprit.sources else ''
    say(
        f'result: the step becomes wrong with operator {culprit.number} of {bisection.operators}, '
        f'{culprit.name}{reads} ({culprit.runs} runs). It writes into other tensors, is wrong '
        f'after the operators before it, or reads a result that is not complete'
    )
    return 1


def _table(operators: Dict[str, ComparedOperator]) -> List[str]:
    rows = sorted(
        operators.items(),
        key=lambda item: (not item[1].wrong_calls, -item[1].worst.excess, item[0]),
    )
    return [f'  {"operator":<44} {"calls":>6} {"error":>9} {"bound":>9}'] + [
        f'  {name:<44} {operator.calls:>6} {operator.worst.error:>9.2g} '
        f'{operator.worst.bound:>9.2g}{"  wrong" if operator.wrong_calls else ""}'
        for name, operator in rows
    ]
