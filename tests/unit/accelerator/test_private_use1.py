"""A device of any make: found, named and asked, in processes that load a double of its plugin."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any, Dict, Optional

import pytest
from doubles import MAKES, make
from support import main_leg, why_no_make
from warm_python import warm_python

from mapsage.accelerator import AcceleratorError, resolve_accelerator

pytestmark = [main_leg, pytest.mark.skipif(bool(why_no_make()), reason=why_no_make())]

ASK = """
import json, sys
import torch
from mapsage.accelerator import *
answers = {}
for name in sys.argv[1:]:
    try:
        chosen = resolve_accelerator(name)
        answers[name] = chosen.describe()
    except AcceleratorError as error:
        answers[name] = str(error)
accelerator = resolve_accelerator(sys.argv[1])
accelerator.set_device(1)
held = torch.zeros(1000, device=accelerator.device(1))
accelerator.seed(3)
drawn = [torch.rand(4, device=accelerator.device(i)).tolist() for i in (0, 1)]
accelerator.seed(3)
again = [torch.rand(4, device=accelerator.device(i)).tolist() for i in (0, 1)]
print(json.dumps(dict(
    answers=answers, name=accelerator.name, communication=accelerator.communication,
    masks=accelerator.masks, count=accelerator.device_count(), why=explain(accelerator),
    allocated=accelerator.memory_allocated(), total=accelerator.memory_total(),
    model=accelerator.card_model(1), software=accelerator.software(), repeats=drawn == again,
    card=accelerator.card(1), amp=str(accelerator.amp_dtype),
    current=int(torch.zeros(1, device=accelerator.device_type).device.index),
    supports=vars(accelerator.supports), probes=accelerator.describe_probes())))
"""


def ask(names: str, environ: Dict[str, str], folder: Path) -> Dict[str, Any]:
    script = folder / 'ask.py'
    script.write_text(ASK)
    finished = subprocess.run(
        [warm_python(), str(script), *names.split()],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.fixture(scope='module')
def answer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.lru_cache(maxsize=None)
    def of_make(name: str) -> Dict[str, Any]:
        return ask(
            f'auto {name} plugin tpu xpu_{name} mlu',
            {**make(name), 'ASCEND_RT_VISIBLE_DEVICES': '5,2', 'FLAGOS_VISIBLE_DEVICES': '4,3,2'},
            tmp_path_factory.mktemp(name),
        )

    return of_make


@pytest.mark.parametrize(
    'name, communication, mask, count',
    [
        ('npu', 'hccl', 'ASCEND_RT_VISIBLE_DEVICES', 2),
        ('mlu', 'cncl', 'MLU_VISIBLE_DEVICES', 8),
        ('musa', 'mccl', 'MUSA_VISIBLE_DEVICES', 8),
        ('flagos', 'flagos', 'FLAGOS_VISIBLE_DEVICES', 3),
    ],
)
def test_auto_chooses_the_device_of_the_plugin(
    name: str, communication: str, mask: str, count: int, answer: Any
) -> None:
    found = answer(name)
    assert (found['name'], found['communication']) == (name, communication)
    assert (found['masks'], found['count']) == ([mask], count)
    line = f'{name} ({count} device(s), gradients over {communication})'
    assert [found['answers'][word] for word in ('auto', name, 'plugin')] == [line] * 3
    assert found['why'].startswith(f'accelerator {line} [cuda: ')
    assert found['why'].endswith('xla: torch_xla is not installed]')


@pytest.mark.parametrize('name', MAKES)
def test_the_card_is_tried(name: str, answer: Any) -> None:
    found = answer(name)
    assert found['supports'] == dict(
        sync_bn=False,
        float64=True,
        int64=True,
        compile=False,
        fused_optimizer=False,
        foreach_optimizer=True,
    )
    assert found['probes'].startswith(f'{name}, tried on the card: int64 yes, float64 yes, ')
    assert found['amp'] == 'torch.bfloat16' and found['repeats'] and found['current'] == 1


def test_a_module_may_lack_functions(answer: Any) -> None:
    full, bare = answer('npu'), answer('flagos')
    assert full['allocated'] >= 4000 and full['total'] > full['allocated']
    assert full['model'] == 'Simulated GCU'
    assert (bare['allocated'], bare['total'], bare['model']) == (None, None, 'flagos')
    assert bare['software'] == {'torch_fl': '2.10.0.double'} and bare['card'] is None


def test_other_names_are_explained(answer: Any) -> None:
    said = answer('npu')['answers']
    assert said['tpu'].startswith("unknown accelerator 'tpu': expected auto, cuda, gcu, gcu_t20, ")
    assert 'plugin of PyTorch (npu, mlu, musa, flagos, or' in said['tpu']
    assert said['mlu'].startswith(
        "accelerator 'mlu' cannot be used here: PyTorch holds one such "
        "device in a process, and 'npu' is loaded. Present: "
    )


BARE = 'import torch\ntorch.utils.rename_privateuse1_backend("opt")\n'
WITH = (
    BARE
    + """
import types
module = types.ModuleType('torch.opt')
{lines}
torch._register_device_module('opt', module)
"""
)


@pytest.mark.parametrize(
    'package, lines, expected',
    [
        (None, None, "unknown accelerator 'opt'"),
        (
            'torch_opt',
            'raise OSError("libopt.so: cannot open")',
            'torch_opt is installed but its import fails: OSError: libopt.so: cannot open. Repair it',
        ),
        (
            'torch_opt',
            WITH.format(lines='module.device_count = lambda: 0'),
            "accelerator 'opt' cannot be used here: torch_opt is installed and shows no device",
        ),
        (
            'torch_opt',
            WITH.format(lines='module.device_count = lambda: 1 // 0'),
            'torch_opt is installed but cannot reach its devices: ZeroDivisionError',
        ),
        (
            'torch_opt',
            'def _autoload():\n    '
            + WITH.format(lines='module.device_count = lambda: 2').replace('\n', '\n    '),
            'opt (2 device(s), gradients through host memory over gloo)',
        ),
    ],
)
def test_another_plugin_by_its_entry_point(
    package: Optional[str], lines: Optional[str], expected: str, tmp_path: Path
) -> None:
    """A plugin of no table, which registers its device when its entry point is called."""
    if package is not None and lines is not None:
        (tmp_path / f'{package}.py').write_text(lines)
        info = tmp_path / f'{package}-1.0.dist-info'
        info.mkdir()
        (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n')
        (info / 'entry_points.txt').write_text(
            f'[torch.backends]\n{package} = {package}:_autoload\n'
        )
    script = tmp_path / 'say.py'
    script.write_text(
        'from mapsage.accelerator import *\ntry:\n'
        '    print(resolve_accelerator("opt").describe())\n'
        'except AcceleratorError as error:\n    print(error)\n'
    )
    said = subprocess.run(
        [warm_python(), str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        timeout=120,
        env={**os.environ, 'PYTHONPATH': str(tmp_path)},
    ).stdout
    assert said.startswith(expected), said


def test_in_a_process_with_simulated_cards_there_is_no_other_make() -> None:
    resolve_accelerator('sim')
    with pytest.raises(AcceleratorError, match="'gcu' has an accelerator of that name"):
        resolve_accelerator('plugin')
    with pytest.raises(AcceleratorError, match="npu.* 'gcu' is loaded"):
        resolve_accelerator('npu')
