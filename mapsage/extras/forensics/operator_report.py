"""`mapsage operators CONFIG`: the operators of a step, and where a card computes them.

The step is recorded on the CPU, in seconds and without the config's data. On a machine with a card,
PyTorch's dispatch table tells where operators are computed; otherwise the list of Enflame's S60.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Callable, Optional, Tuple

import torch
from mmengine.config import Config

from mapsage.accelerator import Accelerator, resolve_accelerator
from mapsage.commands.cli import build_model, read_config
from mapsage.distributed import error_text
from mapsage.engine.config import explain_config_error
from mapsage.engine.env_cfg import ConfigError, parse_env_cfg
from mapsage.extras.forensics.operators.dispatch import require_dispatch_mode
from mapsage.extras.forensics.operators.placement import DispatchTable, OperatorLocations, S60Table
from mapsage.extras.forensics.operators.recording import Recording, WithoutDraws, record
from mapsage.extras.forensics.operators.verdict import StepEstimate, estimate_step, format_rows

from .synthetic_step import IMAGES, SyntheticStep, build_step

# Shipped configs that the S60 trains at a useful speed; docs/how-to/gcu.md has the table of all.
_USEFUL_CONFIGS = (
    'frozen transformers, such as demo/vit_tiny_frozen_demo.py and '
    'dinov3/vit_l_web_frozen_linear_loveda.py'
)


def report_operators(args: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Print the operators of a step of a config and where they are computed; return the status.

    Args:
        args: Options of `list_operators.py`.
        say: Prints a text.

    Raises:
        OperatorError: If torch cannot show the operators.
        ConfigError: If the config cannot be read, its model not be built, or its step fails.
        AcceleratorError: If the accelerator of the command line or config cannot be used.
    """
    require_dispatch_mode()
    cfg = read_config(args)
    locations = choose_locations(cfg)
    training, forward, step = record_config(cfg, args.crop_size)
    height, width = step.crop
    say(f'operators of {args.config}, computed on the card or the CPU by {locations.source}')
    trained, predicted = (estimate_step(recording, locations) for recording in (training, forward))
    for title, recording, estimate in (
        ('a training step', training, trained),
        ('a prediction', forward, predicted),
    ):
        say(
            f'\n{title} of {IMAGES} images of {height} x {width}: {recording.calls} calls of '
            f'{len(recording.uses)} operators, {recording.flops / 1e9:,.1f} GFLOP'
        )
        for line in format_rows(estimate):
            say(line)
        say(_summary(estimate))
    say('\n' + conclusion(trained))
    return 0


def accelerator_of(cfg: Config) -> Accelerator:
    """Return the accelerator that a config asks for, with the options of the command line in it."""
    return resolve_accelerator(
        parse_env_cfg(cfg.get('env_cfg') or {}, cfg.get('model_wrapper_cfg')).accelerator
    )


def choose_locations(cfg: Config) -> OperatorLocations:
    """Return what knows where operators are computed: the card of the config, or the S60's list."""
    accelerator = accelerator_of(cfg)
    # Simulated cards have every kernel of the CPU's, and none in PyTorch's table.
    if accelerator.device_type == 'cpu' or accelerator.simulated:
        return S60Table()
    return DispatchTable(accelerator.device_type, s60_list=accelerator.name == 'gcu')


def record_config(cfg: Config, crop: Optional[int]) -> Tuple[Recording, Recording, SyntheticStep]:
    """Return the operators of a training step and of a prediction, and the step.

    Raises:
        ConfigError: If the model cannot be built or its step fails.
    """
    cfg = without_weights(cfg)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # The run shows these warnings.
        warnings.simplefilter('ignore')
        with WithoutDraws():
            model = build_model(cfg)
        step = build_step(cfg, model, crop)
        step.make_optimizer_state()
        try:
            return record(step.train()), record(step.predict()), step
        # A user's model may raise anything.
        except Exception as error:
            raise ConfigError(
                f'a step with {IMAGES} images of {step.crop[0]} x {step.crop[1]} fails: '
                f'{error_text(explain_config_error(error))}'
            ) from error


def without_weights(cfg: Config) -> Config:
    """Return a copy of a config whose model is built without reading pretrained weights."""

    def strip(node: object) -> None:
        if isinstance(node, dict):
            if (
                isinstance(node.get('init_cfg'), dict)
                and node['init_cfg'].get('type') == 'Pretrained'
            ):
                node['init_cfg'] = None
            for value in node.values():
                strip(value)
        elif isinstance(node, (list, tuple)):
            for value in node:
                strip(value)

    copied = cfg.copy()
    strip(copied._cfg_dict.get('model'))
    return copied


def conclusion(estimate: StepEstimate) -> str:
    """Return the last sentence of the report: is a training worthwhile, and which would be."""
    sentence = f'trains at a useful speed: {estimate.answer}.'
    if estimate.is_useful:
        return sentence
    first = estimate.rows[0]
    return (
        f'{sentence} Most time goes to the CPU, first to {first.name}. Configs that train at '
        f'the speed of this card: {_USEFUL_CONFIGS} (docs/how-to/gcu.md).'
    )


def _summary(estimate: StepEstimate) -> str:
    names = [row.name for row in estimate.rows if row.placement.place.value == 'CPU']
    if not names:
        return '  on the CPU: nothing'
    return (
        f'  on the CPU: {len(names)} operators, {estimate.cpu_calls} calls, '
        f'{estimate.cpu_share:.1%} of the FLOPs, {estimate.host_bytes / 1e6:,.1f} MB through '
        f'the host'
    )
