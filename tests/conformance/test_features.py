"""Each feature of MMEngine ends under MapSageRunner as it ends under MMEngine's Runner."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Callable, Iterator

import mmengine.hooks
import mmengine.optim
import mmseg.engine
import pytest
import torch
from both_runners import Ending, differences, run
from features import CANNOT_RUN, FEATURES, Feature
from mmengine.hooks import Hook
from mmengine.optim import _ParamScheduler
from mmengine.runner import loops
from support import ROOT, main_leg
from tiny_host import tiny_host_config


@pytest.fixture(autouse=True)
def _deterministic_here_alone() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = False


@pytest.fixture(scope='module')
def run_stock(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ending]:
    """Return a function that runs a feature under MMEngine's Runner, once for all tests."""

    @functools.lru_cache(maxsize=None)
    def run_once(name: str) -> Ending:
        (feature,) = (each for each in FEATURES if each.name == name)
        return run('stock', feature.changes, feature.stages, images, tmp_path_factory.mktemp(name))

    return lambda feature: run_once(feature.name)


@pytest.mark.parametrize(
    'feature',
    [
        pytest.param(feature, id=feature.name, marks=() if feature.core else main_leg)
        for feature in FEATURES
    ],
)
def test_both_runners_end_alike(
    feature: Feature, run_stock: Callable[..., Ending], images: Path, tmp_path: Path
) -> None:
    stock = run_stock(feature)
    ours = run('ours', feature.changes, feature.stages, images, tmp_path / 'ours', feature.preview)
    assert feature.fails in stock.error and bool(feature.fails) == bool(stock.error), stock.error
    drawn = (tmp_path / 'ours' / 'run' / 'preview.png').exists()
    assert drawn == (feature.preview and 'Regressor' not in feature.text)
    if feature.differs:
        assert differences(stock, ours), 'alike now: take it from the list and from the docs'
    else:
        assert differences(stock, ours) == []


@pytest.mark.parametrize(
    'feature',
    [
        pytest.param(feature, id=feature.name, marks=() if feature.core else main_leg)
        for feature in FEATURES
        if len(feature.stages) == 2 and not (feature.fails or feature.differs)
    ],
)
@pytest.mark.parametrize('sides', ['stock,ours', 'ours,stock'])
def test_each_runner_goes_on_with_the_others_checkpoint(
    sides: str, feature: Feature, run_stock: Callable[..., Ending], images: Path, tmp_path: Path
) -> None:
    crosswise = run(sides, feature.changes, feature.stages, images, tmp_path)
    assert differences(run_stock(feature), crosswise) == []


def test_no_hook_scheduler_loop_or_wrapper_of_the_host_is_left_out() -> None:
    exported = {
        name: getattr(module, name)
        for module in (mmengine.hooks, mmseg.engine, mmengine.optim, loops)
        for name in dir(module)
    }
    names = {
        name
        for name, kind in exported.items()
        if isinstance(kind, type)
        and (
            issubclass(kind, (Hook, loops.BaseLoop))
            or issubclass(kind, _ParamScheduler)
            and not name.startswith('_')
        )
    }
    names -= {'Hook', 'BaseLoop'}
    names |= {'RepeatDataset', 'ConcatDataset', 'ClassBalancedDataset', 'MultiImageMixDataset'}
    text = repr(tiny_host_config()) + ''.join(feature.text for feature in FEATURES)
    assert sorted(name for name in names if f"'{name}'" not in text) == sorted(CANNOT_RUN)


def test_the_docs_say_what_differs_and_what_cannot_run() -> None:
    text = (ROOT / 'docs' / 'reference' / 'conformance.md').read_text()
    for name, why in [
        *((feature.name, feature.differs) for feature in FEATURES if feature.differs),
        *CANNOT_RUN.items(),
    ]:
        assert f'| `{name}` | {why} |' in text
