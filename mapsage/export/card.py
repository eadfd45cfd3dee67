"""The text of a model card: what a model is, how good it was, and under which license it goes."""
from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from mapsage.inference.description import ExportedDescription

README, CONFIG, WEIGHTS, PREVIEW = 'README.md', 'config.py', 'model.safetensors', 'preview.png'
LICENSE = 'LICENSE.md'
DINOV3_LICENSE = 'https://ai.meta.com/resources/models-and-libraries/dinov3-license/'


@dataclass(frozen=True)
class Validation:
    """Scores of a model on a whole validation set.

    Attributes:
        data: Type of the dataset.
        images: Number of its images.
        figures: Figures by name, as the config's evaluator reports them.
        classes: IoU and accuracy of each class in percent, or None where the evaluator has no
            confusion matrix.
        where: Name of the accelerator, and version of PyTorch.
        date: Day, as 2026-11-23.
    """

    data: str
    images: int
    figures: Mapping[str, float]
    classes: Optional[Sequence[Tuple[float, float]]]
    where: str
    date: str


@dataclass(frozen=True)
class License:
    """What is known of the rights in the weights.

    Attributes:
        weights: Pretrained weights that the config names, from which the training began.
        dinov3: Whether they go under the DINOv3 License.
        text: That license, as it lay beside the weights; None if it did not.
    """

    weights: Tuple[str, ...]
    dinov3: bool
    text: Optional[bytes] = None


@dataclass(frozen=True)
class Card:
    """What the README of a model says.

    Attributes:
        name: Name of the model.
        architecture: Names of the backbone and the head.
        parameters: Number of the weights.
        description: Description of the exported file.
        gsd: Side of a pixel in meters, None if it is not known.
        proof: Lines that the export printed.
        validation: Scores, or None without.
        license: License of the weights.
    """

    name: str
    architecture: str
    parameters: int
    description: ExportedDescription
    gsd: Optional[float]
    proof: Sequence[str]
    validation: Optional[Validation]
    license: License

    def to_text(self) -> str:
        """Return the README: the front matter that model hubs read, then Markdown."""
        about = self.description
        side, bands = about.window, about.bands
        shown = 'red, green, blue' if bands.like_opencv else f'{bands.count} bands'
        pixel = f' of {self.gsd:.4g} m' if self.gsd is not None else ''
        parts = [
            _front_matter(self), f'# {self.name}',
            f'{self.architecture}, {self.parameters / 1e6:.1f} million weights: semantic '
            f'segmentation of remote-sensing images ({shown}) in {len(about.classes)} classes, in '
            f'windows of {side} x {side} pixels{pixel}. Made with MapSage {about.version}.',
            f'![Images, labels, predictions and where they disagree]({PREVIEW})',
            '## Scores', _scores(self), '## Use', _use(), '## Files', _files(self.license),
            '## The proof of model.onnx', _block(self.proof), '## License', _license(self.license)]
        return '\n\n'.join(parts) + '\n'


def _front_matter(card: Card) -> str:
    """Return the YAML of a model hub; each value is JSON, which YAML contains."""
    entries: Dict[str, Any] = dict(
        library_name='mapsage', pipeline_tag='image-segmentation',
        tags=['semantic-segmentation', 'remote-sensing', 'mmsegmentation', 'onnx'])
    if card.license.dinov3:
        entries.update(license='other', license_name='dinov3-license', license_link=(
            LICENSE if card.license.text else DINOV3_LICENSE))
    found = card.validation
    if found is not None:
        entries['model-index'] = [dict(name=card.name, results=[dict(
            task=dict(type='image-segmentation'),
            dataset=dict(name=found.data, type=found.data, split='validation'),
            metrics=[dict(type=name, name=name, value=value)
                     for name, value in found.figures.items()])])]
    lines = [f'{key}: {json.dumps(value, ensure_ascii=False)}' for key, value in entries.items()]
    return '\n'.join(['---', *lines, '---'])


def _scores(card: Card) -> str:
    found = card.validation
    if found is None:
        return 'None: the config has no `val_evaluator`.'
    text = (f'{found.images} images of the validation set ({found.data}), with the weights of '
            f'`{WEIGHTS}`; {found.where}, {found.date}. In percent where the metric is.')
    tables = [_table(['figure', 'value'], [[name, f'{value:.2f}']
                                           for name, value in found.figures.items()])]
    if found.classes is not None:
        tables.append(_table(['class', 'IoU', 'accuracy'], [
            [name, *('none' if value != value else f'{value:.2f}' for value in values)]
            for name, values in zip(card.description.classes, found.classes)]))
    return '\n\n'.join([text, *tables])


def _use() -> str:
    return '\n\n'.join([
        'Maps, without PyTorch, and with it:',
        '```bash\npython tools/predict.py --model model.onnx SCENE... --out maps\n'
        f'python tools/predict.py {CONFIG} {WEIGHTS} SCENE... --out maps\n```',
        'In QGIS, `model.onnx` runs in the plugin Deepness; press its button that loads the '
        "model's default parameters."])


def _files(license_: License) -> str:
    rows = [['model.onnx', 'the model as one file: images of 0..1 in, scores out'],
            ['model.onnx.json, model.stac.json', 'its description for GeoAI, and as a STAC item'],
            [WEIGHTS, 'the weights, for MapSage; without the heads that only training uses'],
            [CONFIG, 'the config of the training, whole'],
            [PREVIEW, 'windows of the validation set']]
    if license_.text:
        rows.append([LICENSE, 'the DINOv3 License'])
    return _table(['file', 'what it is'], rows)


def _license(license_: License) -> str:
    named = ', '.join(f'`{name}`' for name in license_.weights)
    start = f'The training began with {named}. ' if named else ''
    if not license_.dinov3:
        return start + ('No license is stated here. Whoever publishes this folder states one, and '
                        'minds those of pretrained weights and of the data.')
    copy = (f'`{LICENSE}` is a copy of it, which has to stay here.' if license_.text else
            f'A copy of it has to be added to this folder, as `{LICENSE}`, before others get it.')
    return (start + f'These are DINOv3 weights of Meta, and all files made from them go under the '
            f'[DINOv3 License]({DINOV3_LICENSE}): whoever passes them on does so under its terms '
            f'and with a copy of it, and whoever publishes results acknowledges the use of DINOv3. '
            + copy)


def _table(titles: List[str], rows: List[List[str]]) -> str:
    lines = [titles, ['---'] * len(titles), *rows]
    return '\n'.join('| ' + ' | '.join(' '.join(cell.replace('|', r'\|').split()) for cell in line)
                     + ' |' for line in lines)


def _block(lines: Sequence[str]) -> str:
    return '\n'.join(['```', *lines, '```'])
