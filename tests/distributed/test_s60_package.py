"""What importing Enflame's torch_gcu does to a process, and what remains of it, by a double."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from doubles import S60
from ranks import run_ranks
from support import check_finished, launch, main_leg, why_no_make, write_tiny_config

from mapsage.accelerator import AcceleratorError
from mapsage.engine.startup import choose_accelerator, identify_process, join_ranks
from mapsage_launcher import drivers

pytestmark = [main_leg, pytest.mark.skipif(bool(why_no_make()), reason=why_no_make())]

SHORT = """
train_cfg['max_iters'] = 1
val_cfg = val_dataloader = val_evaluator = None
test_cfg = test_dataloader = test_evaluator = None
"""


class RunsCode:
    """An object whose unpickling runs a command."""

    def __reduce__(self) -> Any:
        return os.system, ('touch code_ran',)


def import_and_look(folder: str) -> Dict[str, Any]:
    """What one process finds after the package was imported for the accelerator ``gcu``."""
    os.chdir(folder)
    os.environ[drivers.AUTOLOAD] = '1'
    sys.path.append(folder)
    from mapsage.compat.checkpoint_loading import read_checkpoint
    from mapsage.engine.checkpoints.files import write_checkpoint

    state = dict(weight=torch.arange(12.0).reshape(3, 4), meta=dict(iter=3), wide=[2**40, None])
    digests, before = [], torch.serialization._save
    for moment in ('before', 'after'):
        write_checkpoint(state, f'{moment}.pth')
        digests.append(hashlib.sha256(Path(f'{moment}.pth').read_bytes()).hexdigest())
        if moment == 'before':
            choose_accelerator('gcu')
    import distributed

    on_card = dict(state, weight=state['weight'].to('gcu:1'))
    write_checkpoint(on_card, 'card.pth')
    with open('card.pth', 'rb') as file:
        loaded = read_checkpoint(file, 'cpu')
    with open('evil.pth', 'wb') as file:
        torch.save(dict(weight=RunsCode()), file)
    try:
        with open('evil.pth', 'rb') as file:
            read_checkpoint(file)
        refused = ''
    except pickle.UnpicklingError as error:
        refused = str(error)
    return dict(
        digests=digests,
        swapped=torch.serialization._save is not before,
        autoload=os.environ.get(drivers.AUTOLOAD),
        module=distributed.__file__,
        paths=[path for path in sys.path if path.endswith('torch_gcu')],
        weight=loaded['weight'].tolist(),
        refused=refused,
        ran=Path('code_ran').exists(),
    )


def test_nothing_remains_in_the_process_but_the_devices(tmp_path: Path) -> None:
    (tmp_path / 'distributed.py').write_text('VENDORS = False\n')
    (found,) = run_ranks(import_and_look, 1, tmp_path, str(tmp_path), environ=S60)
    assert found['swapped'] and found['digests'][0] == found['digests'][1]
    assert found['paths'] == [] and found['module'] == str(tmp_path / 'distributed.py')
    assert found['autoload'] == '1'
    assert found['weight'] == torch.arange(12.0).reshape(3, 4).tolist()
    assert 'weights_only' in found['refused'].lower() or 'Unsupported' in found['refused']
    assert not found['ran']


def join(masks: List[str], local_ranks: List[int]) -> str:
    """Join as a rank that sees the cards of its mask; return its card, or the error."""
    rank = int(os.environ['RANK'])
    os.environ.update(TOPS_VISIBLE_DEVICES=masks[rank], LOCAL_RANK=str(local_ranks[rank]))
    identify_process('pytorch')
    try:
        accelerator = choose_accelerator('auto')
        join_ranks('pytorch', accelerator, 'auto', 30)
    except AcceleratorError as error:
        return str(error)
    supports = accelerator.supports
    return (
        f'{accelerator.name} {accelerator.card(local_ranks[rank])} int64 {supports.int64}, '
        f'float64 {supports.float64}, fused {supports.fused_optimizer}'
    )


def test_ranks_with_different_masks_on_one_card_are_refused(tmp_path: Path) -> None:
    """Rank 0 takes the second card of its mask, rank 1 the first of its: both are card 2."""
    for said in run_ranks(join, 2, tmp_path, ['5,2', '2,5'], [1, 0], environ=S60):
        assert 'rank 0 is on the card of rank(s) [1]' in said and 'TOPS_VISIBLE_DEVICES' in said
    assert run_ranks(join, 2, tmp_path, ['5,2', '5,2'], [0, 1], environ=S60) == [
        f'gcu GCU-000{card} int64 False, float64 False, fused False' for card in (5, 2)
    ]


@pytest.mark.long
def test_a_broken_package_does_not_hinder_the_cpu(tiny_data: Path, tmp_path: Path) -> None:
    """From nothing: PyTorch imports the package while it is itself imported, in every process."""
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, SHORT)
    environ = {**S60, 'TORCH_GCU_DOUBLE_BROKEN': '1', drivers.AUTOLOAD: '1'}
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(
            [sys.executable, '-c', 'import torch'],
            env={**os.environ, **environ},
            stderr=subprocess.DEVNULL,
            check=True,
        )
    check_finished(
        launch(
            config,
            '--work-dir',
            tmp_path / 'work',
            '--accelerator',
            'cpu',
            ranks=1,
            environ=environ,
            cold=True,
        )
    )
