"""Embeddings: maps from few points, what 8 bits and 64 dimensions cost, seams, and throughput.

    OMP_NUM_THREADS=1 python tools/benchmarks/embeddings.py points --nwpu data/nwpu_polygons
    OMP_NUM_THREADS=1 python tools/benchmarks/embeddings.py choice --nwpu data/nwpu_polygons
    OMP_NUM_THREADS=1 python tools/benchmarks/embeddings.py clicks
    OMP_NUM_THREADS=1 python tools/benchmarks/embeddings.py seams
    OMP_NUM_THREADS=1 python tools/benchmarks/embeddings.py throughput

``points``: 20, 50 and 200 labeled points, the same number of each class, drawn three times from the
training images of the demo, of NWPU VHR-10 (at half size) and of made crops. The linear probe,
nearest neighbors and the random forest of mapsage classify see the vectors of an encoder at the
points; a segmentor and a U-Net are trained on the same points, on crops around them, for the same
number of steps whatever the points. All are tested on the same random pixels of the validation
images. The encoder of the demo and of NWPU is EfficientNet-Lite0 with the weights of ImageNet, all
levels; that of the crops is the network of configs/stacks, trained here on other made places with
all their labels. A last table has the probe on float32, on 8 bits, and on 64 principal components.

``choice``: how the probe scales vectors, how strongly it is regularized, whether principal components
have their mean subtracted, and by which power of their root mean square the components of vectors are
divided before, on the training images alone: points from every other image,
tests on those between. ``clicks``: seconds from a click in the viewer to the classes of 4 million
cells of 64 dimensions.

Results are lines of a file in ``--work-dir``; runs that are there are not run again.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / 'tools/benchmarks'))

import cv2  # noqa: E402
import torch  # noqa: E402
from _common import describe_machine  # noqa: E402
from mmengine.config import Config  # noqa: E402
from mmseg.structures import SegDataSample  # noqa: E402

import mapsage  # noqa: E402, F401
from mapsage.accelerator import resolve_accelerator, set_current_accelerator  # noqa: E402
from mapsage.commands.cli import build_model  # noqa: E402
from mapsage.datasets import NWPUPolygonDataset  # noqa: E402, F401
from mapsage.extras.demo.crop_places import CROP_CLASSES, CropParams, write_crop_places  # noqa: E402
from mapsage.extras.demo.demo_scenes import SCENE_KINDS, draw_scene  # noqa: E402
from mapsage.extras.embeddings import embed  # noqa: E402
from mapsage.extras.embeddings.classifiers import METHODS, Classifier  # noqa: E402
from mapsage.extras.embeddings.embedding_file import EmbeddingWriter  # noqa: E402
from mapsage.extras.embeddings.embedding_maps import EmbedRun  # noqa: E402
from mapsage.extras.embeddings.encoder import Encoder  # noqa: E402
from mapsage.extras.embeddings.labeling import ClickedMap  # noqa: E402
from mapsage.extras.embeddings.vectors import (  # noqa: E402
    SCHEME,
    Pca,
    dequantize,
    quantize,
    to_unit,
)
from mapsage.maps.inputs import Scene  # noqa: E402
from mapsage.maps.model import find_bands, place_settings  # noqa: E402
from mapsage.maps.places import open_places  # noqa: E402

POINTS, DIMS = (20, 50, 200), 64
# Scenes and seeds of ``points``. The probe's settings were chosen with ``choice`` on demo scenes 0 to
# 15, and once on 100 to 107, with seeds 0 to 2, so the table reads neither.
CHOICE_SEEDS, SEEDS, FRESH_SCENES = (0, 1, 2), (10, 11, 12), (1000, 1100)
BATCH, RATE = 4, 1e-3
# Random pixels of a validation image on which every method is tested.
TESTED = 1500
FPN = 'configs/demo/efficientnet_lite0_fpn_demo.py'
CROPS = 'configs/stacks/resnet18_attention_crops.py'


class Images(NamedTuple):
    """Images and true classes: (bands, height, width), and (height, width) with 255 unknown."""

    images: List[np.ndarray]
    masks: List[np.ndarray]


class Task(NamedTuple):
    """What is compared on one set of images.

    Attributes:
        name: Name of the data.
        train, val: Images.
        classes: Number of classes.
        encoder: Model with the encoder, and the layer.
        crop: Side of the crops that models are trained on, in pixels.
        segmentors: Function that builds a model to train, by name.
    """

    name: str
    train: Images
    val: Images
    classes: int
    encoder: Tuple[Any, str]
    crop: int
    segmentors: Dict[str, Callable[[], Any]]


def demo_task(first_scenes: Tuple[int, int] = FRESH_SCENES) -> Task:
    """Sixteen made aerial scenes to draw points from, and eight to test on, from these seeds on."""

    def draw(first: int, count: int) -> Images:
        kinds = sorted(SCENE_KINDS)
        scenes = [draw_scene(first + n, kinds[n % len(kinds)], 320) for n in range(count)]
        # As LoadImageFromFile: blue first. Masks count from 1, 0 has no data.
        images = [scene.image.transpose(2, 0, 1)[::-1].copy() for scene in scenes]
        return Images(images, [(scene.mask.astype(np.uint8) - 1) for scene in scenes])

    return Task('demo', draw(first_scenes[0], 16), draw(first_scenes[1], 8), 7, *efficient_net(7))


def nwpu_task(root: str) -> Task:
    """40 aerial photos of NWPU VHR-10 at half size to draw points from, and 25 to test on."""
    from mmengine.registry import DefaultScope
    from mmseg.registry import DATASETS

    def read(split: str, most: int) -> Images:
        with DefaultScope.overwrite_default_scope('mmseg'):
            dataset = DATASETS.build(
                dict(
                    type='NWPUPolygonDataset',
                    data_root=root,
                    ann_file=f'{split}.json',
                    data_prefix=dict(img_path='images'),
                    pipeline=[dict(type='LoadImageFromFile'), dict(type='LoadPolygonAnnotations')],
                )
            )
        images, masks = [], []
        for number in range(min(most, len(dataset))):
            sample = dataset[number]
            image, mask = sample['img'], sample['gt_seg_map']
            size = image.shape[1] // 2, image.shape[0] // 2
            images.append(cv2.resize(image, size, interpolation=cv2.INTER_AREA).transpose(2, 0, 1))
            masks.append(cv2.resize(mask, size, interpolation=cv2.INTER_NEAREST))
        return Images(images, masks)

    return Task('nwpu', read('train', 40), read('val', 25), 11, *efficient_net(11))


def efficient_net(classes: int) -> Tuple[Any, int, Dict[str, Callable[[], Any]]]:
    """Return EfficientNet-Lite0 with its layer, crops' side, and the segmentors for three bands."""
    cfg = Config.fromfile(str(ROOT / FPN))
    cfg.model.decode_head.num_classes = classes

    def fpn() -> Any:
        model = build_model(cfg)
        model.init_weights()
        return model

    mean, std = [127.0] * 3, [128.0] * 3
    return (fpn(), 'backbone:all'), 96, {'FPN': fpn, 'U-Net': lambda: unet(3, classes, mean, std)}


def unet(bands: int, classes: int, mean: List[float], std: List[float]) -> Any:
    """Return a U-Net of 8 to 64 channels with random weights."""
    model = dict(
        type='EncoderDecoder',
        data_preprocessor=dict(type='BandDataPreProcessor', mean=mean, std=std),
        backbone=dict(
            type='UNet',
            in_channels=bands,
            base_channels=8,
            num_stages=4,
            strides=(1,) * 4,
            enc_num_convs=(2,) * 4,
            dec_num_convs=(2,) * 3,
            downsamples=(True,) * 3,
            enc_dilations=(1,) * 4,
            dec_dilations=(1,) * 3,
            norm_cfg=dict(type='GN', num_groups=4),
        ),
        decode_head=dict(
            type='FCNHead',
            in_channels=8,
            in_index=3,
            channels=8,
            num_convs=0,
            concat_input=False,
            dropout_ratio=0.0,
            num_classes=classes,
            align_corners=False,
            loss_decode=dict(type='CrossEntropyLoss', avg_non_ignore=True),
        ),
        train_cfg=dict(),
        test_cfg=dict(mode='whole'),
    )
    built = build_model(Config(dict(model=model, default_scope='mmseg')))
    built.init_weights()
    return built


def crops_task(folder: Path, steps: int) -> Task:
    """Twelve made places of crops to draw points from, and four to test on."""
    cfg = Config.fromfile(str(ROOT / CROPS))
    write_crop_places(folder / 'crops', CropParams())
    write_crop_places(folder / 'others', CropParams(seed=7, train_places=24))

    def read(root: Path) -> Images:
        places = open_places(place_settings(cfg))
        images, masks = [], []
        for name, path in places.find([str(root)]).items():
            with places.open(path) as raster:
                images.append(raster.read(0, 0, raster.width, raster.height)[0].astype(np.float32))
            mask = cv2.imread(str(root / f'labels/{name}.tif'), cv2.IMREAD_UNCHANGED)
            masks.append(mask)
        return Images(images, masks)

    def network() -> Any:
        model = build_model(cfg)
        model.init_weights()
        return model

    train, val = read(folder / 'crops/train'), read(folder / 'crops/val')
    others = read(folder / 'others/train')
    torch.manual_seed(0)
    encoder = network()
    everywhere = [np.argwhere(mask < 255)[::37] for mask in others.masks]
    rows = [(n, *p) for n, points in enumerate(everywhere) for p in points]
    weights = folder / 'crops_encoder.pth'
    if weights.exists():
        encoder.load_state_dict(torch.load(weights, weights_only=True))
    else:
        fit(encoder, others, np.array(rows), 0, 2 * steps, 64, dense=True)
        torch.save(encoder.state_dict(), weights)
    # All channels of a stack, as an image of many bands.
    stacked = np.stack([image.reshape(len(image), -1).mean(1) for image in train.images])
    spread = np.stack([image.reshape(len(image), -1).std(1) for image in train.images])
    mean, std = stacked.mean(0).tolist(), (spread.mean(0) + stacked.std(0)).clip(1e-3).tolist()
    return Task(
        'crops',
        train,
        val,
        len(CROP_CLASSES),
        (encoder, 'neck'),
        64,
        {
            'network': network,
            'U-Net': lambda: unet(len(mean), len(CROP_CLASSES), mean, std),
        },
    )


def draw_points(masks: Sequence[np.ndarray], classes: int, count: int, seed: int) -> np.ndarray:
    """Return ``count`` rows of image, row and column, the classes in turn."""
    random = np.random.RandomState(seed)
    by_class = []
    for label in range(classes):
        found = []
        for number in random.permutation(len(masks)):
            spots = np.argwhere(masks[number] == label)
            if len(spots):
                chosen = spots[random.choice(len(spots), min(8, len(spots)), replace=False)]
                found += [(number, *spot) for spot in chosen]
        by_class.append([found[i] for i in random.permutation(len(found))])
    points = []
    for turn in range(max(map(len, by_class))):
        points += [spots[turn] for spots in by_class if turn < len(spots)]
    return np.array(points[:count])


def prepared(model: Any, pixels: np.ndarray) -> Any:
    """Return a batch as the model's preprocessor gives it, and its metadata."""
    size = pixels.shape[2:]
    meta = dict(ori_shape=size, img_shape=size, pad_shape=size, padding_size=[0, 0, 0, 0])
    samples = [SegDataSample(metainfo=dict(meta)) for _ in pixels]
    inputs = [torch.from_numpy(np.ascontiguousarray(image)) for image in pixels]
    data = model.data_preprocessor(dict(inputs=inputs, data_samples=samples), False)
    return data['inputs'], [dict(meta) for _ in pixels]


def fit(
    model: Any,
    data: Images,
    points: np.ndarray,
    seed: int,
    steps: int,
    crop: int,
    dense: bool = False,
) -> None:
    """Train a segmentor on crops of ``crop`` pixels around points.

    Without ``dense`` it sees the labels of the points only.
    """
    random = np.random.RandomState(seed)
    sparse = [np.full_like(mask, 255) for mask in data.masks]
    for number, row, column in points:
        sparse[number][row, column] = data.masks[number][row, column]
    masks = data.masks if dense else sparse
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.01)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group['lr'] = RATE * min(1, (step + 1) / 10) * (1 - step / steps) ** 0.9
        windows, labels = [], []
        for number, row, column in points[random.randint(0, len(points), BATCH)]:
            height, width = masks[number].shape
            top = np.clip(row - random.randint(crop), 0, max(0, height - crop))
            left = np.clip(column - random.randint(crop), 0, max(0, width - crop))
            box = np.s_[top : top + crop, left : left + crop]
            image, mask = data.images[number][(slice(None), *box)], masks[number][box]
            lacking = crop - mask.shape[0], crop - mask.shape[1]
            image = np.pad(image, ((0, 0), (0, lacking[0]), (0, lacking[1])))
            mask = np.pad(mask, ((0, lacking[0]), (0, lacking[1])), constant_values=255)
            flip = random.rand() < 0.5
            windows.append(image[..., ::-1] if flip else image)
            labels.append(mask[:, ::-1] if flip else mask)
        inputs, metas = prepared(model, np.stack(windows))
        logits = model.encode_decode(inputs, metas)[:, :, :crop, :crop]
        target = torch.from_numpy(np.stack(labels).astype(np.int64))
        loss = torch.nn.functional.cross_entropy(logits, target, ignore_index=255)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def padded(image: np.ndarray, multiple: int = 32) -> np.ndarray:
    """Return an image whose sides are multiples, mirrored below and on the right."""
    lacking = [-side % multiple for side in image.shape[1:]]
    return np.pad(image, ((0, 0), (0, lacking[0]), (0, lacking[1])), mode='reflect')


class Vectors:
    """Vectors of an encoder at pixels of images, float32."""

    def __init__(self, model: Any, layer: str) -> None:
        self._model, self._layer = model.eval(), layer

    def at(self, data: Images, spots: np.ndarray) -> np.ndarray:
        """Return (N, C) vectors at (N, 3) rows of image, row and column."""
        vectors = np.empty((0, 0), np.float32)
        for number, image in enumerate(data.images):
            chosen = spots[:, 0] == number
            if not chosen.any():
                continue
            window = padded(image)
            encoder = Encoder(
                copy.deepcopy(self._model), torch.device('cpu'), self._layer, window.shape[1:], 1
            )
            features = encoder.vectors(window[None])[0]
            stride = window.shape[1] // features.shape[1]
            if not vectors.size:
                vectors = np.empty((len(spots), len(features)), np.float32)
            rows, columns = spots[chosen, 1:].T // stride
            vectors[chosen] = features[:, rows, columns].T
        return vectors


def draw_tests(data: Images, classes: int, random: np.random.RandomState) -> np.ndarray:
    """Return rows of image, row and column of random pixels with a class."""
    spots = []
    for number, mask in enumerate(data.masks):
        known = np.argwhere(mask < classes)
        chosen = known[random.choice(len(known), min(TESTED, len(known)), replace=False)]
        spots.append(np.insert(chosen, 0, number, 1))
    return np.concatenate(spots)


def draw_sample(data: Images, random: np.random.RandomState) -> np.ndarray:
    """Return rows of image, row and column of 400 random pixels of each image."""
    spots = [
        np.stack([np.full(400, number), *(random.randint(0, side, 400) for side in mask.shape)], 1)
        for number, mask in enumerate(data.masks)
    ]
    return np.concatenate(spots)


def labels_at(data: Images, spots: np.ndarray) -> np.ndarray:
    """Return the classes at rows of image, row and column."""
    return np.array([data.masks[number][row, column] for number, row, column in spots])


def mean_iou(labels: np.ndarray, predicted: np.ndarray, classes: int) -> float:
    """Return the mean over the classes that occur, in percent."""
    scores = []
    for label in range(classes):
        union = ((labels == label) | (predicted == label)).sum()
        if (labels == label).any():
            scores.append(((labels == label) & (predicted == label)).sum() / union)
    return 100 * float(np.mean(scores))


def compare(task: Task, results: Path, segmentors: Sequence[str], steps: int) -> None:
    """Add the lines of a task that are missing."""
    done = {
        tuple(row[key] for key in ('task', 'points', 'seed', 'method')) for row in rows(results)
    }

    def note(points: int, seed: int, method: str, score: float, seconds: float) -> None:
        row = dict(task=task.name, points=points, seed=seed, method=method)
        with results.open('a') as file:
            file.write(
                json.dumps(dict(row, miou=round(score, 2), seconds=round(seconds, 2))) + '\n'
            )

    random = np.random.RandomState(0)
    tests = draw_tests(task.val, task.classes, random)
    truth = labels_at(task.val, tests)
    vectors = Vectors(*task.encoder)
    tested = vectors.at(task.val, tests)
    sample = draw_sample(task.train, random)
    drawn = [draw_points(task.train.masks, task.classes, max(POINTS), seed) for seed in SEEDS]
    # One pass over the images for all seeds.
    sampled, *at_drawn = np.split(
        vectors.at(task.train, np.concatenate([sample, *drawn])),
        np.cumsum([len(sample), *map(len, drawn[:-1])]),
    )
    pca = Pca.fit(sampled, min(DIMS, sampled.shape[1]), '')

    def reduced(values: np.ndarray) -> np.ndarray:
        return to_unit((values @ pca.components).T).T

    def bytes_of(values: np.ndarray) -> np.ndarray:
        return to_unit(dequantize(quantize(values)).T).T

    kinds = {
        'float32': lambda values: values,
        'int8': bytes_of,
        '64 float32': reduced,
        '64 int8': lambda values: bytes_of(reduced(values)),
    }
    for seed, everything, at_points in zip(SEEDS, drawn, at_drawn):
        for count in POINTS:
            points = everything[:count]
            labels = labels_at(task.train, points)
            for kind, convert in kinds.items():
                for method in METHODS if kind == '64 int8' else METHODS[:1]:
                    name = method if kind == '64 int8' else f'{method}, {kind}'
                    if (task.name, count, seed, name) in done:
                        continue
                    start = time.perf_counter()
                    classifier = Classifier(
                        method, convert(at_points[:count]), labels, task.classes
                    )
                    seconds = time.perf_counter() - start
                    predicted = classifier.predict(convert(tested))[0]
                    score = mean_iou(truth, predicted, task.classes)
                    note(count, seed, name, score, seconds)
    # Trainings last, because they take minutes where the others take seconds.
    for seed, everything in zip(SEEDS, drawn):
        for count in POINTS:
            points = everything[:count]
            for name, build in task.segmentors.items():
                if (task.name, count, seed, name) in done or name not in segmentors:
                    continue
                torch.manual_seed(seed)
                model = build()
                start = time.perf_counter()
                fit(model, task.train, points, seed, steps, task.crop)
                seconds = time.perf_counter() - start
                predicted = np.concatenate(list(predict(model, task.val, tests)))
                note(count, seed, name, mean_iou(truth, predicted, task.classes), seconds)


def choose(task: Task) -> None:
    """Print the scores of settings on the training images: fitted on even ones, tested on odd."""
    from sklearn.linear_model import LogisticRegression

    halves = [Images(task.train.images[first::2], task.train.masks[first::2]) for first in range(2)]
    random = np.random.RandomState(0)
    tests = draw_tests(halves[1], task.classes, random)
    truth = labels_at(halves[1], tests)
    vectors = Vectors(*task.encoder)
    tested = vectors.at(halves[1], tests)
    sample = vectors.at(halves[0], draw_sample(halves[0], random))
    dims = min(DIMS, sample.shape[1])
    components: Dict[str, Callable[[np.ndarray], np.ndarray]] = {}
    for middle, about in ((0, 'the origin'), (sample.mean(0), 'the mean')):
        for power in (0, 0.25, 0.5, 1):
            divisors = np.sqrt(((sample - middle) ** 2).mean(0)) ** power
            divided = (sample - middle) / divisors
            axes = np.linalg.eigh(divided.T @ divided)[1][:, -dims:] / divisors[:, None]
            components[f'about {about}, rms ** {power:g}'] = partial(
                lambda middle, axes, values: (values - middle) @ axes, middle, axes
            )
    scales = {'one scale': lambda spread: spread.mean(), 'a scale each': lambda spread: spread}
    table: Dict[Tuple[str, str, float], List[float]] = {}
    for seed in CHOICE_SEEDS:
        points = draw_points(halves[0].masks, task.classes, max(POINTS), seed)
        at_points, labels = vectors.at(halves[0], points), labels_at(halves[0], points)
        for name, reduce in components.items():
            known, unknown = (
                to_unit(dequantize(quantize(to_unit(reduce(values).T)))).T
                for values in (at_points, tested)
            )
            for scale, spread_of in scales.items():
                for strength in (0.01, 0.1, 1.0, 10.0):
                    for count in POINTS:
                        middle = known[:count].mean(0)
                        spread = np.sqrt(((known[:count] - middle) ** 2).mean(0))
                        spread = np.maximum(spread_of(spread), 1e-6)
                        model = LogisticRegression(C=strength, max_iter=1000)
                        model.fit((known[:count] - middle) / spread, labels[:count])
                        predicted = model.predict((unknown - middle) / spread)
                        score = mean_iou(truth, predicted, task.classes)
                        table.setdefault((name, scale, strength), []).append(score)
    print(
        f'\n{task.name}: mIoU on odd training images, mean over seeds at {POINTS} points, and of all'
    )
    for key, scores in sorted(table.items(), key=lambda item: -np.mean(item[1])):
        by_count = np.mean(np.array(scores).reshape(len(CHOICE_SEEDS), len(POINTS)), 0)
        shown = ''.join(f'{score:8.1f}' for score in (*by_count, np.mean(scores)))
        print(f'components {key[0]:28}{key[1]:14}C={key[2]:<6g}{shown}', flush=True)


def clicks(folder: Path, repeats: int = 3) -> None:
    """Print the seconds from a click to the classes of 4 million cells, by as many threads as cores."""
    from concurrent.futures import ThreadPoolExecutor

    side, tile, cores = 2048, 256, len(os.sched_getaffinity(0))
    # Without compression, which random vectors do not have anyway.
    random, path = np.random.RandomState(0), folder / 'clicks.tif'
    facts = dict(identity=dict(encoder='random'), dequantize=SCHEME)
    with EmbeddingWriter(path, side, side, DIMS, None, None, facts) as writer:
        for row in range(0, side, tile):
            vectors = random.standard_normal((DIMS, tile, side)).astype(np.float32)
            writer.write(row, quantize(to_unit(vectors)))
    clicked = ClickedMap([str(path)])
    tiles = [(row, column) for row in range(side // tile) for column in range(side // tile)]
    names = [f'class {number}' for number in range(6)]
    points = [
        Clicked(0, random.uniform(0, side), random.uniform(0, side), names[number % 6])
        for number in range(12)
    ]
    with ThreadPoolExecutor(cores) as threads:
        for turn in range(repeats + 1):
            start, busy = time.perf_counter(), time.process_time()
            clicked.fit(points[: 11 + turn % 2], names)
            fitted = time.perf_counter() - start
            list(threads.map(lambda place: clicked.tile(0, 'classes', 0, *place), tiles))
            seconds = time.perf_counter() - start
            busy = time.process_time() - busy
            words = 'first, from the file' if turn == 0 else 'again'
            print(
                f'{words}: fit {fitted:.3f} s, with {side * side:,} cells {seconds:.2f} s; '
                f'{busy:.2f} s of processor time',
                flush=True,
            )
    print(f'{cores} threads; load {os.getloadavg()[0]:.1f}')


class Clicked(NamedTuple):
    """A point as the viewer has it."""

    file: int
    x: float
    y: float
    name: str


def predict(model: Any, data: Images, tests: np.ndarray) -> Iterator[np.ndarray]:
    """Yield a segmentor's classes at the rows of each image, which are in the order of images."""
    for number, image in enumerate(data.images):
        _, rows, columns = tests[tests[:, 0] == number].T
        with torch.no_grad():
            logits = model.encode_decode(*prepared(model, padded(image)[None]))[0]
        yield logits.argmax(0).numpy()[rows, columns]


def rows(path: Path) -> List[Dict[str, Any]]:
    """Return the results so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def print_tables(results: List[Dict[str, Any]]) -> None:
    """Print mean and range over the seeds, of mIoU in percent."""
    for task in dict.fromkeys(row['task'] for row in results):
        print(f'\n{task}: mIoU, mean (lowest..highest) of seeds; seconds to fit')
        names = list(dict.fromkeys(row['method'] for row in results if row['task'] == task))
        for name in names:
            cells, seconds = [], []
            for count in POINTS:
                chosen = [
                    row
                    for row in results
                    if (row['task'], row['method'], row['points']) == (task, name, count)
                ]
                scores = [row['miou'] for row in chosen]
                seconds += [row['seconds'] for row in chosen]
                cells.append(
                    f'{np.mean(scores):5.1f} ({min(scores):.1f}..{max(scores):.1f}) n={len(scores)}'
                    if scores
                    else '-'
                )
            print(
                f'{name:20}' + ''.join(f'{cell:>28}' for cell in cells) + f'{np.mean(seconds):9.2f}'
            )


ENCODERS = {
    'EfficientNet-Lite0, ImageNet, last level': (FPN, ['--layer', 'backbone', '--window', '256']),
    'EfficientNet-Lite0, ImageNet, all levels': (
        FPN,
        ['--layer', 'backbone:all', '--window', '256'],
    ),
    'DINOv3 ViT, random': ('configs/demo/vit_tiny_frozen_demo.py', ['--window', '256']),
    'ResNet-18 over dates, random': (CROPS, ['--layer', 'neck', '--window', '128']),
    'OlmoEarth, random': ('configs/earth/olmoearth_tiny_crops.py', ['--window', '128']),
    'TerraMind, random': ('configs/earth/terramind_tiny_crops.py', ['--window', '128']),
    'DOFA, random': ('configs/earth/dofa_tiny_crops.py', ['--window', '128']),
    'Prithvi, random': ('configs/earth/prithvi_tiny_crops.py', ['--window', '128']),
}


def write_scene(folder: Path, side: int) -> Path:
    """Write a made aerial scene of ``side`` pixels."""
    path = folder / f'scene{side}.png'
    cv2.imwrite(str(path), draw_scene(3, 'village', side).image[:, :, ::-1])
    return path


def seams(folder: Path) -> None:
    """Print the seam index of every kind of encoder, with and without context and blending."""
    scene = write_scene(folder, 1024)
    write_crop_places(folder / 'large', CropParams(train_places=1, val_places=1, size=384))
    print(f'{"encoder":44}{"margin and overlap":>20}{"none":>8}')
    for name, (config, options) in ENCODERS.items():
        inputs = scene if '256' in options else folder / 'large/train'
        indices = []
        for number, more in enumerate(([], ['--margin', '0', '--overlap', '0'])):
            out = folder / 'seams' / f'{name}{number}'
            words = [str(ROOT / config), str(inputs), '--out', str(out), *options, *more]
            with torch.no_grad():
                embed.main([*words, '--accelerator', 'cpu', '--overwrite'])
            report = next(path for path in out.glob('*.json') if path.name != 'pca.json')
            indices.append(json.loads(report.read_text())['seam_index'])
        print(f'{name:44}{indices[0]:20.3f}{indices[1]:8.3f}', flush=True)


def throughput(folder: Path, repeats: int = 3) -> None:
    """Print windows a second of mapsage embed next to those of the bare encoder, by turns."""
    scene, config = write_scene(folder, 1024), str(ROOT / FPN)
    cfg = Config.fromfile(config)
    model = build_model(cfg).eval()
    model.init_weights()
    side, batch = 256, 8
    opened = Scene(str(scene), find_bands(cfg, model))
    windows = np.stack([opened.read(0, 0, (side, side))[0] for _ in range(batch)])
    words = ['--window', str(side), '--batch-size', str(batch), '--accelerator', 'cpu']
    rates: Dict[str, List[Tuple[float, float]]] = {'bare': [], 'embed': [], 'embed --dims 64': []}

    def note(name: str, count: int, start: float, busy: float) -> None:
        seconds = time.perf_counter() - start, time.process_time() - busy
        rates[name].append((count / seconds[0], count / seconds[1]))

    for _ in range(repeats):
        inputs, _ = prepared(model, windows)
        with torch.no_grad():
            model.backbone(inputs)
            start, busy = time.perf_counter(), time.process_time()
            for _ in range(6):
                model.backbone(inputs)
            note('bare', 6 * batch, start, busy)
        for name, more in (('embed', []), ('embed --dims 64', ['--dims', '64'])):
            lines: List[str] = []
            args = embed.build_parser().parse_args(
                [config, str(scene), '--out', str(folder / name), *words, *more, '--overwrite']
            )
            args.checkpoint = None
            planned = EmbedRun(args, lines.append)
            # Reading, blending and writing count, and starting does not.
            start, busy = time.perf_counter(), time.process_time()
            planned.run()
            note(name, int(lines[-1].split()[0]), start, busy)
    print(f'windows of {side} pixels a second: by the clock, and a second of processor time')
    for name, values in rates.items():
        shown = ', '.join(f'{clock:.1f} / {processor:.1f}' for clock, processor in values)
        ratios = np.median(np.array(values) / np.array(rates['bare']), axis=0)
        print(f'{name:20}{shown}; of the bare encoder {ratios[0]:.2f} / {ratios[1]:.2f}')
    print(f'load {os.getloadavg()[0]:.1f}')


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        'word', choices=['points', 'choice', 'clicks', 'seams', 'throughput', 'table']
    )
    parser.add_argument('--nwpu', help='folder of NWPU VHR-10')
    parser.add_argument('--work-dir', default='work_dirs/embeddings_benchmark')
    parser.add_argument('--tasks', nargs='+', default=['demo', 'crops', 'nwpu'])
    parser.add_argument(
        '--segmentors',
        nargs='*',
        default=['FPN', 'network', 'U-Net'],
        help='which of these to train',
    )
    parser.add_argument('--steps', type=int, default=60, help='steps of a training')
    args = parser.parse_args()
    set_current_accelerator(resolve_accelerator('cpu'))
    folder = Path(args.work_dir)
    folder.mkdir(parents=True, exist_ok=True)
    print(describe_machine(), flush=True)
    in_folder = dict(seams=seams, throughput=throughput, clicks=clicks).get(args.word)
    if in_folder is not None:
        with tempfile.TemporaryDirectory() as temporary:
            in_folder(Path(temporary))
    else:
        results = folder / 'results.jsonl'
        makers: Dict[str, Callable[[], Task]] = {
            'demo': demo_task,
            'crops': lambda: crops_task(folder, args.steps),
            'nwpu': lambda: nwpu_task(args.nwpu),
        }
        for name in [] if args.word == 'table' else args.tasks:
            if name == 'nwpu' and not args.nwpu:
                print('nwpu: left out without --nwpu')
            elif args.word == 'choice':
                choose(demo_task((0, 100)) if name == 'demo' else makers[name]())
            else:
                compare(makers[name](), results, args.segmentors, args.steps)
        if args.word != 'choice':
            print_tables(rows(results))


if __name__ == '__main__':
    main()
