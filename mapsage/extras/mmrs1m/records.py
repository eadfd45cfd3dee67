"""The conversations of MMRS-1M as records: the class of an image, or boxes with a phrase.

The format follows the README of the set (EarthGPT) and published code that reads it;
docs/reference/datasets.md lists the files of the set that were examined. Boxes refer to an image
that was padded to a square, so they must go through `undo_padding` before they are pixels.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from mapsage.base.files import parse_json

_OBJECT = re.compile(r'<p>(.*?)</p>\s*\[([^\[\]]*)\]', re.DOTALL)
_REGION = re.compile(r':\s*\[([^\[\]]*)\]\s*$')
_COUNT = re.compile(
    r'^(?:\d+|an?|one|two|three|four|five|six|seven|eight|nine|ten)\s+', re.IGNORECASE
)

# Coordinates have at least two decimals, so rounding may move a box beyond the image by this share
# of the side. A box further outside was not padded as the README describes.
_ROUNDING = 0.01


class Box(NamedTuple):
    """Corners of a box, in 0..1 of the padded square or in pixels of the image, by context."""

    x0: float
    y0: float
    x1: float
    y1: float


class Conversation(NamedTuple):
    """One element of the JSON list: the image path as written, and (prompt, answer) pairs."""

    image: str
    exchanges: Tuple[Tuple[str, str], ...]


def read_conversations(path: Path) -> List[Conversation]:
    """Read a JSON list of ``{"image": ..., "conversations": [{"from": ..., "value": ...}]}``.

    Raises:
        ValueError: If the file or a record has another form; the message gives the number of the
            record, counted from 0.
    """
    if not path.is_file():
        raise ValueError(
            f'{path} does not exist, expected a JSON file of MMRS-1M such as '
            'data/json/detection/<set>/<set>.json; check ann_file and data_root'
        )
    try:
        source = parse_json(path.read_text(encoding='utf-8'))
    except ValueError as error:
        raise ValueError(
            f'{path} is not valid JSON ({error}); it may be cut off, copy it again'
        ) from error
    if not isinstance(source, list) or not source:
        raise ValueError(
            f'{path} holds {type(source).__name__}, expected a list with records '
            '{"image", "conversations"} as in MMRS-1M'
        )
    return [
        _parse_conversation(record, f'{path}: record {number}')
        for number, record in enumerate(source)
    ]


def _parse_conversation(record: object, where: str) -> Conversation:
    """Return a record of the JSON list; ``where`` names the record in the error message."""
    fields: Dict[str, Any] = record if isinstance(record, dict) else {}
    messages = fields.get('conversations')
    if not isinstance(messages, list):
        messages = []
    valid = all(
        isinstance(message, dict)
        and message.get('from') == speaker
        and isinstance(message.get('value'), str)
        for message, speaker in zip(messages, ('human', 'gpt') * len(messages))
    )
    if not valid or not messages or len(messages) % 2 or not isinstance(fields.get('image'), str):
        raise ValueError(
            f'{where} is {str(record)[:120]}, expected {{"image": path, '
            '"conversations": [{"from": "human", "value": ...}, {"from": "gpt", '
            '"value": ...}, ...]}; correct or remove it'
        )
    texts = [message['value'] for message in messages]
    return Conversation(fields['image'], tuple(zip(texts[::2], texts[1::2])))


def read_class(conversation: Conversation, where: str) -> str:
    """Return the class name that a classification record answers.

    Raises:
        ValueError: If the record does not have exactly one answer, or it is not a plain phrase.
    """
    answers = [answer.strip().rstrip('.') for _, answer in conversation.exchanges]
    if len(answers) != 1 or not answers[0] or set('<[]>') & set(answers[0]):
        raise ValueError(
            f'{where} answers {answers}, expected one class name; is it a record of '
            "data/json/classification? For boxes use task='box'"
        )
    return answers[0]


def read_objects(conversation: Conversation, where: str) -> List[Tuple[str, Box]]:
    """Return phrases and boxes (0..1 of the padded square) of a detection or grounding record.

    A detection record answers ``There are <p>2 ships</p>[x0,y0,x1,y1;x0,y0,x1,y1]``. A visual
    grounding record asks ``...: [x0,y0,x1,y1]`` and answers with the phrase.

    Raises:
        ValueError: If a prompt and its answer have neither form, or a box is not four numbers in
            0..1 with x0 <= x1 and y0 <= y1.
    """
    objects: List[Tuple[str, Box]] = []
    for prompt, answer in conversation.exchanges:
        tagged_phrases = _OBJECT.findall(answer)
        rest = _OBJECT.sub('', answer)
        region = _REGION.search(prompt)
        if tagged_phrases and not set('<[]>') & set(rest):
            objects += [
                (phrase.strip(), _parse_box(text, where))
                for phrase, boxes in tagged_phrases
                for text in boxes.strip().rstrip(';').split(';')
            ]
        elif region and answer.strip() and not set('<[]>') & set(answer):
            objects.append((answer.strip().rstrip('.'), _parse_box(region.group(1), where)))
        else:
            raise ValueError(
                f'{where} asks {prompt[-80:]!r} and answers {answer[:120]!r}, '
                'expected <p>phrase</p>[x0,y0,x1,y1;...] in the answer, or a box at '
                'the end of the question; correct or remove it'
            )
    return objects


def _parse_box(text: str, where: str) -> Box:
    try:
        numbers = [float(number) for number in text.split(',')]
    except ValueError:
        numbers = []
    if len(numbers) == 8:
        raise ValueError(
            f'{where} has an oriented box [{text}]; only upright boxes x0,y0,x1,y1 '
            'are read. Use the file of horizontal boxes (HBB), or convert it'
        )
    if (
        len(numbers) != 4
        or not all(0 <= v <= 1 for v in numbers)
        or (numbers[0] > numbers[2] or numbers[1] > numbers[3])
    ):
        raise ValueError(
            f'{where} has the box [{text}], expected x0,y0,x1,y1 in 0..1 with '
            'x0 <= x1 and y0 <= y1; correct it'
        )
    return Box(*numbers)


def undo_padding(box: Box, width: int, height: int, where: str) -> Box:
    """Return a box in pixels of its image.

    As the set's README describes, the shorter side of an image was padded to the longer one, with
    ``int((longer - shorter) / 2)`` pixels before it; coordinates were divided by the longer one.

    Args:
        box: Box in 0..1 of the padded square.
        width: Width of the image in pixels.
        height: Height of the image in pixels.
        where: File and number of the record, with which an error message begins.

    Raises:
        ValueError: If the box lies outside the image by more than 1 % of the longer side.
    """
    side = max(width, height)
    pad_x, pad_y = int((side - width) / 2), int((side - height) / 2)
    x0, x1 = box.x0 * side - pad_x, box.x1 * side - pad_x
    y0, y1 = box.y0 * side - pad_y, box.y1 * side - pad_y
    slack = _ROUNDING * side
    if min(x0, y0) < -slack or x1 > width + slack or y1 > height + slack:
        raise ValueError(
            f'{where} has the box {list(box)}, which is x {x0:.1f}..{x1:.1f}, y {y0:.1f}..{y1:.1f} '
            f'in its image of {width} x {height} pixels (width x height) once the padding to a '
            'square is undone; outside it. Was this file normalized by width and height instead?'
        )
    return Box(max(x0, 0.0), max(y0, 0.0), min(x1, float(width)), min(y1, float(height)))


def object_name(phrase: str) -> str:
    """Return a phrase without its count, in lower case: ``13 Ships`` gives ``ships``."""
    return _COUNT.sub('', phrase.strip()).lower()


def find_class(name: str, classes: Sequence[str]) -> int:
    """Return the index of the class with this name, or -1.

    A name that ends in s also matches its singular: ``ships`` is the class ``ship``.
    """
    lowered = [c.lower() for c in classes]
    for form in (name, name[:-1] if name.endswith('s') else name):
        if form in lowered:
            return lowered.index(form)
    return -1
