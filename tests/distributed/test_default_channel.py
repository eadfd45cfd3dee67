"""The channel of the sampling library under another engine: no secret, no home folder in common."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import List, Tuple

import torch
import torch.distributed as dist
from ranks import run_ranks

from mapsage.distributed import RankLostError
from mapsage.sampling import default_channel, exchange, plan_exchange


def start_like_another_engine(folder: str) -> int:
    for name in ('MAPSAGE_SECRET', 'MAPSAGE_SECRET_FILE', 'XDG_CONFIG_HOME'):
        os.environ.pop(name, None)
    # As on several machines whose home folders differ.
    os.environ['HOME'] = os.path.join(folder, os.environ['RANK'])
    os.mkdir(os.environ['HOME'])
    dist.init_process_group('gloo', timeout=timedelta(seconds=60))
    return dist.get_rank()


def sample(folder: str) -> Tuple[List[int], List[int], List[int]]:
    rank = start_like_another_engine(folder)
    batch = exchange([10 * rank + number for number in range([6, 0, 3][rank])], plan)
    pair = dist.new_group([0, 2])
    gathered = []
    if rank != 1:
        gathered = [int(row) for row in default_channel(pair, 30).gather(torch.tensor(rank))]
    dist.barrier()
    lost: List[int] = []
    channel = default_channel(timeout=2)
    if rank != 1:
        try:
            channel.max(torch.tensor([rank]))
        except RankLostError as error:
            lost = error.ranks
    dist.barrier()
    return batch, gathered, lost


plan = plan_exchange([6, 0, 3], 3)


def test_ranks_meet_without_a_secret_and_name_the_one_that_stays_away(tmp_path: Path) -> None:
    ranks = run_ranks(sample, 3, tmp_path, str(tmp_path))
    assert sorted(number for batch, _, _ in ranks for number in batch) == [*range(6), 20, 21, 22]
    assert [len(batch) for batch, _, _ in ranks] == [3, 3, 3]
    assert [gathered for _, gathered, _ in ranks] == [[0, 2], [], [0, 2]]
    assert [lost for _, _, lost in ranks] == [[1], [], [1]]
    assert not list(tmp_path.glob('*/.config')), 'a rank made a secret of its own'
