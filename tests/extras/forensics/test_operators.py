"""`mapsage operators CONFIG`: the report of shipped and broken configs."""

from __future__ import annotations

from pathlib import Path
from typing import Tuple

import pytest
import torch
from mmengine.config import Config
from support import ROOT

from mapsage.commands import doctor
from mapsage.engine.env_cfg import ConfigError
from mapsage.extras.forensics import list_operators
from mapsage.extras.forensics.operator_report import conclusion, record_config
from mapsage.extras.forensics.operators.dispatch import HAS_DISPATCH_MODE
from mapsage.extras.forensics.operators.placement import S60Table
from mapsage.extras.forensics.operators.verdict import estimate_step

pytestmark = pytest.mark.usefixtures('own_environment')
has_modes = pytest.mark.skipif(not HAS_DISPATCH_MODE, reason='torch before 2.0')


def ask(capsys: pytest.CaptureFixture, *words: object) -> Tuple[int, str]:
    status = list_operators.main([*map(str, words), '--accelerator', 'cpu'])
    return status, capsys.readouterr().out


@has_modes
def test_a_convolutional_config_does_not_train_on_the_s60(
    tiny_config: Path, capsys: pytest.CaptureFixture
) -> None:
    status, report = ask(capsys, tiny_config)
    assert status == 0 and 'the list of S60, torch_gcu 2.10 (not measured' in report
    row = next(line for line in report.splitlines() if 'convolution_backward' in line)
    assert "CPU (on the vendor's list for the CPU)" in row
    training, prediction = report.split('a prediction of 2 images')
    assert 'on the CPU: nothing' in prediction and 'through the host' in training
    last = report.strip().splitlines()[-1]
    assert last.startswith('trains at a useful speed: no:') and 'vit_tiny_frozen_demo' in last


@has_modes
def test_the_size_of_images_can_be_chosen(
    tiny_config: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_state = torch.get_rng_state()
    report = ask(capsys, tiny_config, '--crop-size', 48)[1]
    assert 'a training step of 2 images of 48 x 48' in report
    assert torch.equal(torch.get_rng_state(), random_state)
    with pytest.raises(SystemExit):
        ask(capsys, tiny_config, '--crop-size', '0')
    assert "a number of pixels from 1, got '0'" in capsys.readouterr().err


@has_modes
@pytest.mark.parametrize(
    'name, most_flops_on_cpu', [('vit_tiny_frozen_demo', 0.006), ('vit_tiny_lora_demo', 0.004)]
)
def test_frozen_transformers_train_on_the_s60(name: str, most_flops_on_cpu: float) -> None:
    cfg = Config.fromfile(str(ROOT / f'configs/demo/{name}.py'))
    training, prediction, step = record_config(cfg, None)
    estimate = estimate_step(training, S60Table())
    assert estimate.is_useful and 0 < estimate.cpu_share < most_flops_on_cpu
    assert conclusion(estimate).startswith('trains at a useful speed: yes')
    assert step.crop == (128, 128) and not estimate_step(prediction, S60Table()).cpu_calls


@has_modes
def test_a_config_that_cannot_be_built_is_an_error(tiny_config: Path) -> None:
    cfg = Config.fromfile(str(tiny_config))
    with pytest.raises(ConfigError, match='a step with 2 images of 1 x 1 fails'):
        record_config(
            Config(
                dict(
                    cfg,
                    model=dict(
                        cfg.model, decode_head=dict(cfg.model.decode_head, ignore_index='none')
                    ),
                )
            ),
            1,
        )
    cfg.model.decode_head.type = 'FCNHeed'
    with pytest.raises(ConfigError, match='model cannot be built.*FCNHead'):
        record_config(cfg, None)


@has_modes
def test_the_old_option_of_the_doctor(tiny_config: Path, capsys: pytest.CaptureFixture) -> None:
    assert doctor.main([str(tiny_config), '--operators', '--accelerator', 'cpu']) == 0
    output = capsys.readouterr()
    assert 'operators of' in output.out
    assert output.err.startswith('DeprecationWarning: doctor --operators is now `mapsage operators')
    with pytest.raises(SystemExit):
        doctor.main(['--compare'])
    assert '--compare needs a config: mapsage operators CONFIG --comp' in capsys.readouterr().err
