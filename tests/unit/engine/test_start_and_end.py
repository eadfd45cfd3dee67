"""All ranks refuse a work dir that another training writes to, and none is to blame for it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, List

import torch.distributed as dist
from forked import fork_ranks
from ranks import run_ranks
from support import on_host

from mapsage.base import folder_claims
from mapsage.base.folder_claims import claimed
from mapsage.engine.startup import alone_in_work_dir

pytestmark = on_host


def enter(folder: Path, work: Path) -> Any:
    rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
    store = dist.FileStore(str(folder / 'store'), world)
    dist.init_process_group('gloo', store=store, rank=rank, world_size=world)
    folder_claims._PATIENCE = 0.3
    try:
        with alone_in_work_dir(str(work), logging.getLogger()):
            return None
    except Exception as error:
        return type(error).__name__, str(error)


def enter_while_claimed(folder: Path) -> List[Any]:
    (folder / 'work').mkdir()
    with claimed(folder / 'work', ['the training'], ''):
        return fork_ranks(enter, 3, folder / 'ranks', folder, folder / 'work')


def test_each_rank_gives_the_same_error(tmp_path: Path) -> None:
    [errors] = run_ranks(enter_while_claimed, 1, tmp_path, tmp_path, timeout=300)
    assert {kind for kind, _ in errors} == {'FolderClaimedError'}, errors
    assert len({text for _, text in errors}) == 1
    assert 'work is in use: process ' in errors[2][1] and 'choose another' in errors[2][1]
