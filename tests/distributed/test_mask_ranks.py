"""EoMT and PMT on several ranks, from all feature sources, and on simulated cards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from mask_runs import config_of, run_of, weights_of
from ranks import run_ranks
from support import check_finished, launch, no_simulated_cards

V = 4
NO_SIM = no_simulated_cards()
LOAD = {'weights_only': False} if torch.__version__ >= '2' else {}


def trained(kind: str, data: Path, folder: Path, processes: int, changes: Dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    if processes == 1:  # one process alone, without torch.distributed
        for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'):
            os.environ.pop(name, None)
    launcher = 'none' if processes == 1 else 'pytorch'
    runner, recorder = run_of(kind, data, folder, steps=4, launcher=launcher, **changes)
    model = runner.train()
    weights = {name.replace('module.', '', 1): value for name, value in weights_of(model).items()}
    return dict(losses=recorder.losses, weights=weights)


@pytest.mark.parametrize(
    'kind, several', [('eomt', (4, 3)), pytest.param('pmt', (2,), marks=pytest.mark.long)]
)
def test_any_number_of_processes_has_the_same_bits(
    kind: str, several: Any, tiny_data: Path, tmp_path: Path
) -> None:
    """Four virtual ranks with unequal numbers of masks."""
    found = {
        processes: run_ranks(
            trained,
            processes,
            tmp_path / f'ranks_{processes}',
            kind,
            tiny_data,
            tmp_path / f'run_{processes}',
            processes,
            {'env_cfg.virtual_ranks': V, 'env_cfg.reduction': 'ordered'},
            environ={'PYTHONPATH': str(Path(__file__).parents[1])},
        )[0]
        for processes in (*several, 1)
    }
    for processes in several:
        assert found[processes]['losses'] == found[1]['losses']
        for name, value in found[1]['weights'].items():
            if 'running_' not in name and 'num_batches' not in name:  # of the first virtual rank
                assert torch.equal(value, found[processes]['weights'][name]), (processes, name)
    assert all(torch.isfinite(value).all() for value in found[1]['weights'].values())


@pytest.mark.long
def test_features_may_come_from_anywhere(tiny_data: Path, tmp_path: Path) -> None:
    """PMT's weights are those of features computed in place, bit for bit."""

    def run(name: str, source: Any = None) -> Any:
        more = {} if source is None else dict(feature_source=source)
        return run_ranks(
            trained,
            1,
            tmp_path / f'rank_{name}',
            'pmt',
            tiny_data,
            tmp_path / name,
            1,
            dict(more, plain=True),
            environ={'PYTHONPATH': str(Path(__file__).parents[1])},
        )[0]

    expected = run('local')
    cfg = config_of('pmt', tiny_data, tmp_path / 'streamed', steps=4, plain=True)
    path = tmp_path / 'pmt.py'
    cfg.dump(str(path))
    made = run_ranks(make_cache, 1, tmp_path / 'maker', path, tmp_path / 'features')
    assert made == [0]
    found: Dict[str, List[Any]] = {
        name: run(name.lower(), source)
        for name, source in dict(
            Prefetched=dict(type='Prefetched'),
            Cached=dict(type='Cached', folder=str(tmp_path / 'features')),
        ).items()
    }
    finished = launch(
        path,
        '--work-dir',
        tmp_path / 'streamed',
        ranks=2,
        environ={'ENCODERS': '1', 'ACCELERATOR': 'cpu'},
    )
    check_finished(finished)
    saved = torch.load(str(tmp_path / 'streamed' / 'iter_4.pth'), map_location='cpu', **LOAD)
    found['Streamed'] = dict(losses=expected['losses'], weights=saved['state_dict'])
    for source, run_of_it in found.items():
        assert run_of_it['losses'] == expected['losses'], source
        for name, value in expected['weights'].items():
            assert torch.equal(run_of_it['weights'][name], value), (source, name)


def make_cache(config: Path, folder: Path) -> int:
    from mapsage.extras.streaming import cache_features

    return cache_features.main(
        [
            str(config),
            '--folder',
            str(folder),
            '--accelerator',
            'cpu',
            '--work-dir',
            str(folder.parent / 'cache'),
        ]
    )


@pytest.mark.skipif(NO_SIM is not None, reason=str(NO_SIM))
@pytest.mark.parametrize('kind', ['eomt', 'pmt'])
def test_simulated_cards_train_as_the_cpu_does(kind: str, tiny_data: Path, tmp_path: Path) -> None:
    found = run_ranks(
        on_both,
        1,
        tmp_path / 'ranks',
        kind,
        tiny_data,
        tmp_path,
        environ={'PYTHONPATH': str(Path(__file__).parents[1])},
    )[0]
    assert found['sim'] == pytest.approx(found['cpu'], rel=1e-3)


def on_both(kind: str, data: Path, folder: Path) -> Dict[str, List[float]]:
    # Simulated cards first: PyTorch counts devices at the first backward pass.
    return {
        name: trained(kind, data, folder / name, 1, {'env_cfg.accelerator': name})['losses']
        for name in ('sim', 'cpu')
    }


@pytest.mark.skipif(NO_SIM is not None, reason=str(NO_SIM))
def test_an_eomt_that_is_cut_trains_as_a_whole_one(tiny_data: Path, tmp_path: Path) -> None:
    """Its last blocks are on two cards, and the head that calls them on the second of these."""
    tests = str(Path(__file__).parents[1])
    found = {
        name: run_ranks(
            trained,
            1,
            tmp_path / f'ranks_{name}',
            'eomt',
            tiny_data,
            tmp_path / name,
            1,
            {'env_cfg.accelerator': name, 'env_cfg.use_model_parallel': name == 'sim'},
            environ={'PYTHONPATH': tests, 'MAPSAGE_SIM_DEVICES': '3'},
        )[0]
        for name in ('sim', 'cpu')
    }
    assert found['sim']['losses'] == pytest.approx(found['cpu']['losses'], rel=1e-3)
