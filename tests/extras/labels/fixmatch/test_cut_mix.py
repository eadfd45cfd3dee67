"""Boxes of the other image, in images, classes and features alike."""

from __future__ import annotations

import torch

from mapsage.extras.labels.fixmatch.cut_mix import box_masks, draw_boxes, paste


def test_classes_are_pasted_with_their_image() -> None:
    torch.manual_seed(0)
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 16, 16)
    classes = torch.arange(4).view(4, 1, 1).expand(4, 16, 16)
    boxes = draw_boxes(4, 1.0, (16, 16))
    mixed, answers = paste(images, boxes), paste(classes, boxes)
    assert torch.equal(mixed[:, 0].long(), answers)
    for number in range(4):
        inside = box_masks(boxes, (16, 16))[number]
        assert 0 < int(inside.sum()) < 256
        assert (answers[number][inside] == 3 - number).all()
        assert (answers[number][~inside] == number).all()


def test_boxes_are_drawn_as_often_and_as_large_as_they_should_be() -> None:
    torch.manual_seed(0)
    boxes = draw_boxes(4000, 0.5, (64, 64))
    sides = boxes[:, 1::2] - boxes[:, ::2]
    area = sides.prod(1)
    drawn = area > 0
    assert abs(float(drawn.float().mean()) - 0.5) < 0.03
    assert 0.01 < float(area[drawn].min()) < 0.03 and 0.35 < float(area.max()) < 0.43
    assert float(boxes.min()) >= 0 and float(boxes.max()) <= 1
    assert not draw_boxes(9, 0.0, (8, 8)).any()


def test_a_box_cuts_whole_cells_of_the_features() -> None:
    """A cell of features is pasted if and only if all pixels that it covers are pasted."""
    torch.manual_seed(0)
    boxes = draw_boxes(50, 1.0, (4, 8))
    cells, pixels = box_masks(boxes, (4, 8)), box_masks(boxes, (64, 128))
    assert torch.equal(cells.repeat_interleave(16, 1).repeat_interleave(16, 2), pixels)
