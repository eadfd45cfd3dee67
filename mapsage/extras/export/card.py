"""Text of a model card: the README with architecture, scores, files and license of a model.

The front matter follows the conventions of model hubs. The command that collects the facts is
`commands/model_card.py`; this module only formats them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from mapsage.maps.description import ExportedDescription
from mapsage.maps.file_inputs import layout_of
from mapsage.models.weight_license import WeightsLicense

README, CONFIG, WEIGHTS, PREVIEW = 'README.md', 'config.py', 'model.safetensors', 'preview.png'
LICENSE = 'LICENSE.md'
DINOV3_LICENSE = 'https://ai.meta.com/resources/models-and-libraries/dinov3-license/'


@dataclass(frozen=True)
class Validation:
    """Scores of a model on a whole validation set.

    Attributes:
        data: Type of the dataset.
        images: Number of images.
        figures: Metric name -> value, as the config's evaluator reports them.
        classes: IoU and accuracy of the classes in percent; None if the evaluator has no confusion
            matrix.
        where: Name of the accelerator and version of PyTorch.
        date: Day of the validation, such as 2026-11-23.
    """

    data: str
    images: int
    figures: Mapping[str, float]
    classes: Optional[Sequence[Tuple[float, float]]]
    where: str
    date: str


@dataclass(frozen=True)
class License:
    """License of the pretrained weights that the training started from.

    Attributes:
        weights: Names of the pretrained weights in the config.
        dinov3: Whether the DINOv3 License applies to them.
        text: Text of the DINOv3 License from the folder of the weights; None if it was not there.
        published: Licenses of the weights of other backbones, which state them.
    """

    weights: Tuple[str, ...]
    dinov3: bool
    text: Optional[bytes] = None
    published: Tuple[WeightsLicense, ...] = ()


@dataclass(frozen=True)
class Card:
    """Content of a model's README.

    Attributes:
        name: Name of the model.
        architecture: Names of the backbone and the head.
        parameters: Number of weights.
        description: Description of the exported file.
        gsd: Side of a pixel in meters; None if unknown.
        proof: Lines that the export printed.
        validation: Scores; None if the config has no ``val_evaluator``.
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
        description = self.description
        side, layout = description.window, layout_of(description.places)
        takes = (
            'red, green, blue'
            if description.bands.like_opencv
            else f'{description.bands.count} bands'
            if layout is None
            else ' and '.join(
                f'{sensor.name}: {sensor.max_dates} date(s) of {", ".join(sensor.bands)}'
                for sensor in layout.sensors
            )
        )
        pixel = f' of {self.gsd:.4g} m' if self.gsd is not None else ''
        paragraphs = [
            _front_matter(self),
            f'# {self.name}',
            f'{self.architecture}, {self.parameters / 1e6:.1f} million weights: semantic '
            f'segmentation of remote-sensing images ({takes}) in {len(description.classes)} '
            f'classes, in windows of {side} x {side} pixels{pixel}. Made with MapSage '
            f'{description.version}.',
            f'![Images, labels, predictions and where they disagree]({PREVIEW})',
            '## Scores',
            _scores(self),
            '## Use',
            _use(description),
            '## Files',
            _files(self.license, description),
            '## The proof of model.onnx',
            _block(self.proof),
            '## License',
            _license(self.license),
        ]
        return '\n\n'.join(paragraphs) + '\n'


def _front_matter(card: Card) -> str:
    """Return the YAML front matter. Values are written as JSON, a subset of YAML."""
    entries: Dict[str, Any] = dict(
        library_name='mapsage',
        pipeline_tag='image-segmentation',
        tags=['semantic-segmentation', 'remote-sensing', 'mmsegmentation', 'onnx'],
    )
    if card.license.dinov3:
        entries.update(
            license='other',
            license_name='dinov3-license',
            license_link=(LICENSE if card.license.text else DINOV3_LICENSE),
        )
    elif card.license.published:
        stated = card.license.published[0]
        entries.update(
            license='other',
            license_link=stated.link,
            license_name=stated.name.lower().replace(' ', '-'),
        )
    validation = card.validation
    if validation is not None:
        entries['model-index'] = [
            dict(
                name=card.name,
                results=[
                    dict(
                        task=dict(type='image-segmentation'),
                        dataset=dict(
                            name=validation.data, type=validation.data, split='validation'
                        ),
                        metrics=[
                            dict(type=name, name=name, value=value)
                            for name, value in validation.figures.items()
                        ],
                    )
                ],
            )
        ]
    lines = [f'{key}: {json.dumps(value, ensure_ascii=False)}' for key, value in entries.items()]
    return '\n'.join(['---', *lines, '---'])


def _scores(card: Card) -> str:
    validation = card.validation
    if validation is None:
        return 'None: the config has no `val_evaluator`.'
    text = (
        f'{validation.images} images of the validation set ({validation.data}), with the '
        f'weights of `{WEIGHTS}`; {validation.where}, {validation.date}. In percent where the '
        f'metric is.'
    )
    tables = [
        _table(
            ['figure', 'value'],
            [[name, f'{value:.2f}'] for name, value in validation.figures.items()],
        )
    ]
    if validation.classes is not None:
        # NaN, the score of a class without pixels, is not equal to itself.
        tables.append(
            _table(
                ['class', 'IoU', 'accuracy'],
                [
                    [name, *('none' if value != value else f'{value:.2f}' for value in values)]
                    for name, values in zip(card.description.classes, validation.classes)
                ],
            )
        )
    return '\n\n'.join([text, *tables])


def _use(description: ExportedDescription) -> str:
    inputs = (
        'SCENE...'
        if description.places is None
        else ('BEFORE.tif AFTER.tif' if description.places['type'] == 'ChangeDataset' else 'FOLDER')
    )
    return '\n\n'.join(
        [
            'Predict maps, without PyTorch and with PyTorch:',
            f'```bash\npython tools/predict.py --model model.onnx {inputs} --out maps\n'
            f'python tools/predict.py {CONFIG} {WEIGHTS} {inputs} --out maps\n```',
            'Without MapSage, docs/how-to/export.md has the code that fills the inputs of the file.'
            if description.places is not None
            else 'In QGIS, `model.onnx` runs in the plugin Deepness; press the button there that loads the '
            "model's default parameters.",
        ]
    )


def _files(license_: License, description: ExportedDescription) -> str:
    files = (
        [
            ['model.onnx', 'the model as one file: images of 0..1 in, scores out'],
            ['model.onnx.json, model.stac.json', 'its description for GeoAI, and as a STAC item'],
        ]
        if description.places is None
        else [
            [
                'model.onnx',
                'the model as one file: pixels, valid pixels and days of each sensor in, '
                'scores out',
            ],
            ['model.stac.json', 'its description as a STAC item'],
        ]
    )
    rows = [
        *files,
        [WEIGHTS, 'the weights, for MapSage; without the heads that only training uses'],
        [CONFIG, 'the complete config of the training'],
        [PREVIEW, 'windows of the validation set'],
    ]
    if license_.text:
        rows.append([LICENSE, 'the DINOv3 License'])
    return _table(['file', 'what it is'], rows)


def _license(license_: License) -> str:
    names = ', '.join(f'`{name}`' for name in license_.weights)
    origin = f'The training started from {names}. ' if names else ''
    stated = ' '.join(published.describe() for published in license_.published)
    if stated:
        origin += f'{stated} This applies to files made from them, too. '
    if not license_.dinov3:
        if stated:
            return origin.rstrip()
        return origin + (
            'No license is stated here. If you publish this folder, state one, and '
            'respect the licenses of the pretrained weights and of the data.'
        )
    copy = (
        f'`{LICENSE}` is a copy of it, which must stay in this folder.'
        if license_.text
        else f'Add a copy of it to this folder, as `{LICENSE}`, before you share the folder.'
    )
    return (
        origin + f'These are DINOv3 weights of Meta. The [DINOv3 License]({DINOV3_LICENSE}) '
        f'applies to all files made from them: share them only under its terms and with a '
        f'copy of it, and acknowledge the use of DINOv3 when you publish results. ' + copy
    )


def _table(titles: List[str], rows: List[List[str]]) -> str:
    lines = [titles, ['---'] * len(titles), *rows]
    return '\n'.join(
        '| ' + ' | '.join(' '.join(cell.replace('|', r'\|').split()) for cell in line) + ' |'
        for line in lines
    )


def _block(lines: Sequence[str]) -> str:
    return '\n'.join(['```', *lines, '```'])
