"""A logger is built whatever cards the process sees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mmengine.logging import MMLogger


@pytest.mark.parametrize(
    'mask, local_rank',
    [(None, 1), ('0', 1), ('', 0), ('', 1), ('-1', 3), ('3,5', 2), ('GPU-5a5a', 1), (None, 0)],
)
def test_ranks_that_outnumber_the_cards(
    mask: str, local_rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What mmengine asks PyTorch on a machine with one card.
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setenv('LOCAL_RANK', str(local_rank))
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    if mask is not None:
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', mask)
    logger = MMLogger(f'{tmp_path.name}-{local_rank}', log_file=str(tmp_path / 'run.log'))
    logger.warning('written')
    for handler in logger.handlers:
        handler.close()
    assert 'written' in (tmp_path / 'run.log').read_text()


def test_a_logger_asks_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError('the driver fails')

    monkeypatch.setattr(torch.cuda, 'is_available', fail)
    MMLogger(tmp_path.name)
