"""Tensors in nested containers move to one device, and their containers keep their kind."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from mmengine.structures import BaseDataElement, PixelData
from support import no_simulated_cards

from mapsage.accelerator import resolve_accelerator
from mapsage.distributed.nested_tensors import move

CPU = torch.device('cpu')
Pair = namedtuple('Pair', 'left right')


def test_what_is_there_is_not_copied() -> None:
    element = BaseDataElement(labels=PixelData(data=torch.zeros(1, 2, 2)))
    value = [dict(a=torch.ones(2), b='name'), (1, None), Pair(torch.zeros(1), element)]
    assert move(value, CPU) is value


@pytest.mark.skipif(no_simulated_cards() is not None, reason=f'sim: {no_simulated_cards()}')
def test_everything_arrives_and_keeps_its_kind() -> None:
    resolve_accelerator('sim')
    device = torch.device('gcu:3')
    stays = torch.ones(2, device=device)
    element = BaseDataElement(
        labels=PixelData(data=torch.arange(4).reshape(1, 2, 2)), metainfo=dict(img_path='a.png')
    )
    value = OrderedDict(pair=Pair(torch.ones(2, device='gcu:2'), stays), rest=[element, 'name', 7])
    moved = move(value, device)
    assert type(moved) is OrderedDict and type(moved['pair']) is Pair
    assert moved['pair'].left.device == device and moved['pair'].right is stays
    there, name, number = moved['rest']
    assert (name, number) == ('name', 7) and there.img_path == 'a.png'
    assert there.labels.data.device == device
    assert there.labels.data.cpu().flatten().tolist() == [0, 1, 2, 3]
    assert value['pair'].left.device == torch.device('gcu:2')  # the original is left alone
