"""Heads that get their features from encoders on devices or a cache, and heads on two devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import pytest
import torch
from cards import launch_on_cards, load, logged, run_tool, write_start
from frozen_config import PLAIN
from replica_runs import TRAINING, Run, check_close, streamed
from support import check_finished, write_tiny_config

SHORT = (
    PLAIN
    + """
train_cfg.update(max_iters=4, val_interval=4)
default_hooks['preview'] = None
default_hooks['checkpoint']['interval'] = 4
"""
)
Trained = Tuple[List[float], Dict[str, torch.Tensor]]


class Heads:
    """Trains the head of one config from one start, on two ranks, with features from a source."""

    def __init__(self, config: Path) -> None:
        self.config, self.start = config, write_start(config)

    def train(
        self, name: str, source: Optional[Dict[str, Any]], cards: int, accelerator: str = 'cuda'
    ) -> Trained:
        variant, work = self.config.with_name(f'{name}.py'), self.config.with_name(name)
        variant.write_text(
            self.config.read_text() + (f'feature_source = {source!r}\n' if source else '')
        )
        check_finished(
            launch_on_cards(
                variant,
                '--work-dir',
                work,
                '--cfg-options',
                f'load_from={self.start}',
                cards=cards,
                ranks=2 + (source or {}).get('encoders', 0),
                environ={'ACCELERATOR': accelerator},
            )
        )
        return logged(work), load(work / 'iter_4.pth')['state_dict']


@pytest.fixture(scope='module')
def heads(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return Heads(
        write_tiny_config(tmp_path_factory.mktemp('features') / 'plain.py', tiny_data, SHORT)
    )


@pytest.fixture(scope='module')
def local(heads: Heads) -> Trained:
    """Two ranks with a card each, which encode for themselves."""
    return heads.train('local', None, cards=2)


def check_equal(trained: Trained, other: Trained) -> None:
    assert len(trained[0]) == 4 and trained[0] == other[0]
    assert list(trained[1]) == list(other[1])
    assert all(torch.equal(trained[1][name], weight) for name, weight in other[1].items())


def test_an_encoder_on_a_third_card_feeds_the_same_head(heads: Heads, local: Trained) -> None:
    check_equal(heads.train('streamed', dict(type='Streamed', encoders=1), cards=3), local)


def test_a_cache_that_a_card_filled_feeds_the_same_head(heads: Heads, local: Trained) -> None:
    folder = heads.config.with_name('cache')
    check_finished(
        run_tool(
            'cache_features',
            heads.config,
            '--folder',
            folder,
            '--cfg-options',
            f'load_from={heads.start}',
        )
    )
    check_equal(heads.train('cached', dict(type='Cached', folder=str(folder)), cards=2), local)


@pytest.mark.parametrize('cards', [1, 8])
def test_heads_on_cpus_beside_an_encoder_on_a_card(
    cards: int, heads: Heads, local: Trained
) -> None:
    losses, weights = heads.train(
        f'cpu_heads_{cards}', dict(type='Streamed', encoders=1, accelerator='cuda'), cards, 'cpu'
    )
    assert losses == pytest.approx(local[0], rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, local[1][name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_head_on_two_cards_trains_what_one_card_trains(tiny_data: Path, tmp_path: Path) -> None:
    runs = {}
    for name, source, cards in (('alone', None, 1), ('together', streamed(2, 2), 4)):
        config = write_tiny_config(
            tmp_path / f'{name}.py',
            tiny_data,
            TRAINING + (f'feature_source = {source!r}\n' if source else ''),
        )
        check_finished(launch_on_cards(config, '--work-dir', tmp_path / name, cards=cards))
        runs[name] = Run(tmp_path / name)
    check_close(runs['together'], runs['alone'])
