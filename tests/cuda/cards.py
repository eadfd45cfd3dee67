"""The user's own commands on the devices of the CUDA double, and what a run leaves behind.

Each test says how many devices the processes of its runs see. ``ACCELERATOR`` names cuda here,
since tests of this leg that do not name it mean the CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from support import ROOT, Finished, Launch, launch

# Hooks and models of the tests, which a config imports by name.
TEST_CODE = ':'.join(str(ROOT / 'tests' / folder) for folder in ('integration', 'distributed', ''))


def card_variables(cards: int, accelerator: str = 'cuda') -> Dict[str, str]:
    """Return the environment of a machine with a number of devices, and the wanted accelerator."""
    return {'CUDA_DOUBLE_DEVICES': str(cards), 'ACCELERATOR': accelerator, 'PYTHONPATH': TEST_CODE}


def start_on_cards(
    *arguments: Any,
    cards: int = 2,
    ranks: Optional[int] = None,
    environ: Optional[Dict[str, str]] = None,
    **options: Any,
) -> Launch:
    """Start the training script, or another command, on a machine with a number of devices.

    Args:
        arguments: Arguments of the script.
        cards: Devices of the machine.
        ranks: Number of ranks; None: one a device.
        environ: More environment variables. ``ACCELERATOR`` is cuda unless it is given here.
        options: Further arguments of :class:`support.Launch`.
    """
    return Launch(
        *arguments,
        ranks=cards if ranks is None else ranks,
        environ={**card_variables(cards), **(environ or {})},
        **options,
    )


def launch_on_cards(*arguments: Any, timeout: float = 120.0, **options: Any) -> Finished:
    """Start and finish a run of :func:`start_on_cards`; it fails after ``timeout`` seconds."""
    return start_on_cards(*arguments, **options).finish(timeout)


def run_tool(
    name: str,
    *arguments: Any,
    cards: int = 1,
    accelerator: str = 'cuda',
    environ: Optional[Dict[str, str]] = None,
) -> Finished:
    """Run ``tools/<name>.py`` in one process on a machine with a number of devices."""
    return launch(
        *arguments,
        '--accelerator',
        accelerator,
        command=[sys.executable, f'tools/{name}.py'],
        environ={**card_variables(cards, accelerator), **(environ or {})},
        timeout=120.0,
    )


def logged(work: Path, name: str = 'loss') -> List[float]:
    """Return the values that a run logged under a name, in order, over all its starts."""
    lines = [
        json.loads(line)
        for path in sorted(work.glob('*/vis_data/scalars.json'))
        for line in path.read_text().splitlines()
    ]
    return [line[name] for line in lines if name in line]


def load(path: Union[str, Path]) -> Dict[str, Any]:
    """Return a checkpoint, its tensors on the CPU."""
    return torch.load(str(path), map_location='cpu', weights_only=False)


def write_start(config: Path) -> Path:
    """Write initial weights of a config's model next to it, drawn on the CPU; return their path.

    A device draws other weights from the same seed. Runs on several kinds of devices are equal
    from the first step only if they begin with ``load_from=<this path>``.
    """
    cfg = Config.fromfile(str(config), import_custom_modules=False)
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = MODELS.build(cfg.model)
    path = config.with_suffix('.start.pth')
    torch.save(dict(state_dict=model.state_dict(), meta={}), str(path))
    return path
