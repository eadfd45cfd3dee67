"""mmseg imports without compiled ops, and a called op says what to install."""
from __future__ import annotations

import sys

import mmcv
import pytest

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
