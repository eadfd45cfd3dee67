"""mmseg imports without compiled ops, and a called op says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mmcv
import pytest
from support import PATIENT, ROOT

from mapsage.compat import mmcv_ops

STAND_IN = isinstance(sys.modules.get(mmcv_ops.EXTENSION), mmcv_ops._MissingOps)


def test_mmseg_models_import() -> None:
    import mmseg.models

    assert mmseg.models.EncoderDecoder.__name__ == 'EncoderDecoder'


@pytest.mark.skipif(not STAND_IN, reason=f'mmcv {mmcv.__version__} has compiled ops')
def test_a_called_op_says_what_to_install() -> None:
    extension = sys.modules[mmcv_ops.EXTENSION]
    with pytest.raises(mmcv_ops.MissingOpError, match="'sigmoid_focal_loss_forward' was called"):
        extension.sigmoid_focal_loss_forward(1, b=2)
    with pytest.raises(mmcv_ops.MissingOpError, match='pip install "mmcv<2.2.0"'):
        import torch
        from mmcv.ops import sigmoid_focal_loss

        sigmoid_focal_loss(torch.ones(2, 2), torch.zeros(2, dtype=torch.long))


@pytest.mark.skipif(not STAND_IN, reason=f'mmcv {mmcv.__version__} has compiled ops')
def test_python_may_ask_the_stand_in_for_anything_of_its_own() -> None:
    extension = sys.modules[mmcv_ops.EXTENSION]
    assert not hasattr(extension, '__wrapped__') and not hasattr(extension, '__path__')
    assert extension.__spec__ is not None


def test_applying_twice_changes_nothing() -> None:
    before = sys.modules.get(mmcv_ops.EXTENSION)
    assert not mmcv_ops.apply()
    assert sys.modules.get(mmcv_ops.EXTENSION) is before


# Modules that have tried to import ops before MapSage: the fork's guard them, upstream's fail.
IMPORTED_BEFORE = """
import contextlib, importlib, sys
import mmengine
for name in ('mmcv.ops', 'mmseg.models', 'mmseg.apis'):
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(name)
import of_a_user
import mapsage, mmseg.apis, mmcv.ops, torch
from mmcv.cnn.bricks import transformer
from mmseg.models.decode_heads import san_head
from mmseg.registry import MODELS

plain = dict(in_channels=8, in_index=0, channels=8, num_classes=3)
image = torch.ones(1, 8, 6, 6)
print(MODELS.build(dict(plain, type='CCHead', recurrence=1))([image]).shape)
point = MODELS.build(dict(plain, type='PointHead', in_channels=[8], in_index=[0]))
print(point._get_fine_grained_point_feats([image], torch.rand(1, 5, 2)).shape)
MODELS.build(dict(plain, type='PSAHead', mask_size=(6, 6)))
missing = [name for module, names in {
    transformer: ['MultiScaleDeformableAttention'],
    sys.modules['mmseg.models.losses.focal_loss']: ['_sigmoid_focal_loss'],
    san_head: ['point_sample', 'get_uncertain_point_coords_with_randomness'],
    of_a_user: ['nms', 'renamed', 'ops'],
}.items() for name in names if getattr(module, name, None) is None]
print(missing, of_a_user.roi_align, of_a_user.no_op)
"""
OF_A_USER = """
try:
    from mmcv import ops
    from mmcv.ops import nms, point_sample as renamed
except ImportError:
    ops = nms = None
try:
    from mmcv.ops import roi_align
except ImportError:
    roi_align = 'a replacement'
try:
    from mmcv.ops import no_op
except ImportError:
    no_op = None
"""


@pytest.mark.long
@pytest.mark.skipif(not STAND_IN, reason=f'mmcv {mmcv.__version__} has compiled ops')
def test_models_imported_before_mapsage_have_the_ops(tmp_path: Path) -> None:
    """A notebook imports the host packages first, in any order."""
    (tmp_path / 'of_a_user.py').write_text(OF_A_USER)
    printed = subprocess.check_output(
        [sys.executable, '-W', 'ignore', '-c', IMPORTED_BEFORE],
        timeout=PATIENT,
        cwd=str(tmp_path),
        env=dict(os.environ, PYTHONPATH=f'{ROOT}{os.pathsep}{tmp_path}'),
    ).decode()
    assert printed.splitlines()[-3:] == [
        'torch.Size([1, 3, 6, 6])',
        'torch.Size([1, 8, 5])',
        '[] a replacement None',
    ]
