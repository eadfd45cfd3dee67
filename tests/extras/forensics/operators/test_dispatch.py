"""Names of operators, and the refusal of versions of torch that cannot show them."""

from __future__ import annotations

import pytest
import torch

from mapsage.extras.forensics.operators import dispatch
from mapsage.extras.forensics.operators.dispatch import (
    OperatorError,
    is_view,
    operator_name,
    require_dispatch_mode,
)

has_modes = pytest.mark.skipif(not dispatch.HAS_DISPATCH_MODE, reason='torch before 2.0')


def test_an_old_torch_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, 'HAS_DISPATCH_MODE', False)
    with pytest.raises(OperatorError, match=rf'torch>=2.0.*{torch.__version__.split("+")[0]}'):
        require_dispatch_mode()


@has_modes
def test_names_are_those_of_the_lists() -> None:
    aten = torch.ops.aten
    assert [
        operator_name(operator)
        for operator in (aten.mm.default, aten.add.Tensor, torch.ops.prims.sin.default)
    ] == ['mm', 'add.Tensor', 'prims::sin']


@has_modes
def test_views_are_told_from_writes() -> None:
    aten = torch.ops.aten
    assert is_view(aten.transpose.int) and is_view(aten.split.Tensor)
    assert not is_view(aten.add_.Tensor) and not is_view(aten.mm.default)
