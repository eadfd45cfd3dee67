"""How often scenes that a model does not know are found and rightly named, and what that costs.

    python tools/benchmarks/passport.py [--trials 20] [--consistent 500] [--photos DIR] [--seed N] [--costs]

Scenes are generated from seeds of the commit's hash (``--seed`` replaces it), so that nobody has
tuned on them: fields of six covers in the bands of Sentinel-2, and towns from above in red, green and
blue. A passport is made of 8 scenes, ten times. A scene is then altered in one way, its metadata are absent,
true or lying, and the check of `mapsage predict` examines it. A trial counts as found if anything is
said, or its bands are read in the right order; as named if the kind is right.

Consistent scenes have other seeds, an illumination of 0.85 to 1.15, haze of up to 0.015 reflectance in
the shortest band, and noise of up to 3 %. ``--photos`` adds crops of a folder of real aerial images,
which are compared with the passport of other crops of it. ``--costs`` measures the costs only: the
share of the start of a training on 1,000 and on 8,000 scenes, and of maps.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import cv2  # noqa: E402
import numpy as np  # noqa: E402
import rasterio  # noqa: E402
from _common import describe_machine  # noqa: E402
from rasterio.enums import ColorInterp  # noqa: E402
from rasterio.transform import from_origin  # noqa: E402

from mapsage.datasets import GeoTiffDataset  # noqa: E402
from mapsage.geo import GeoError, facts_of, open_scene  # noqa: E402
from mapsage.geo.passport import describe_part  # noqa: E402
from mapsage.geo.scene_facts import sample_quantiles  # noqa: E402
from mapsage.maps.description import Bands  # noqa: E402
from mapsage.maps.errors import PredictError  # noqa: E402
from mapsage.maps.inputs import (
    Door,  # noqa: E402
    Scene,  # noqa: E402
)

SIDE, TRAINED = 256, 8
NAMES = ('B02', 'B03', 'B04', 'B08', 'B11', 'B12')
# Reflectances of water, forest, meadow, crop, soil, town in the bands above.
COVERS = np.array(
    [
        [0.035, 0.030, 0.020, 0.010, 0.006, 0.004],
        [0.020, 0.038, 0.022, 0.250, 0.110, 0.050],
        [0.035, 0.070, 0.045, 0.360, 0.210, 0.110],
        [0.045, 0.080, 0.070, 0.300, 0.240, 0.150],
        [0.080, 0.110, 0.150, 0.220, 0.310, 0.260],
        [0.110, 0.130, 0.150, 0.190, 0.220, 0.200],
    ]
)
# Green covers in autumn: drier and darker in the near infrared.
AUTUMN = np.array([1.0, 0.75, 1.5, 0.4, 1.3, 1.6])
# Colors of roof, street, lawn, trees, water, light in 8 bits.
COLORS = np.array(
    [[150, 80, 65], [120, 118, 115], [95, 125, 70], [50, 75, 45], [40, 60, 75], [205, 200, 190]]
)


class Altered(NamedTuple):
    """A way in which a scene is unlike the training.

    Attributes:
        named: Kinds that name it rightly.
        aerial: Whether it is a photo in red, green and blue.
        shows: Whether pixels alone can show it.
    """

    named: Set[str]
    aerial: bool = False
    shows: bool = True


KINDS = {
    'wrong offset': Altered({'offset'}),
    'wrong unit': Altered({'unit'}),
    'bands swapped': Altered({'bands'}),
    'a band missing': Altered({'bands'}),
    'pixel size': Altered({'pixel'}, shows=False),
    '8 for 16 bits': Altered({'depth'}),
    'contrast stretched': Altered({'contrast'}, aerial=True),
    'other sensor': Altered({'sensor', 'level'}, shows=False),
    'BGR': Altered({'bands'}, aerial=True, shows=False),
    'other season': Altered({'season'}, shows=False),
}
STATES = ('absent', 'true', 'lying')


def draw_fields(random: np.random.RandomState, autumn: bool = False) -> np.ndarray:
    """Return reflectances (bands, SIDE, SIDE) of a scene of its own mix of covers."""
    mix = random.dirichlet(np.full(len(COVERS), 1.5)) * 0.9 + 0.1 / len(COVERS)
    fields = random.choice(len(COVERS), (16, 16), p=mix).astype(np.float32)
    covers = cv2.resize(fields, (SIDE, SIDE), interpolation=cv2.INTER_NEAREST).astype(int)
    spectra = COVERS * (AUTUMN if autumn else 1)
    tones = random.normal(1, 0.12, (16, 16)).astype(np.float32)
    tone = cv2.resize(tones, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)
    light = random.uniform(0.85, 1.15)
    haze = random.uniform(0, 0.015) * np.array([1, 0.7, 0.5, 0.25, 0.1, 0.05])
    noise = random.normal(1, random.uniform(0.005, 0.03), (len(NAMES), SIDE, SIDE))
    values = spectra[covers].transpose(2, 0, 1) * tone * light * noise
    return np.clip(values + haze[:, None, None], 0.0005, 1)


def draw_photo(random: np.random.RandomState) -> np.ndarray:
    """Return colors (3, SIDE, SIDE) of a town, 0 to 255."""
    mix = random.dirichlet(np.full(len(COLORS), 2.0)) * 0.8 + 0.2 / len(COLORS)
    blocks = random.choice(len(COLORS), (32, 32), p=mix).astype(np.float32)
    covers = cv2.resize(blocks, (SIDE, SIDE), interpolation=cv2.INTER_NEAREST).astype(int)
    light, haze = random.uniform(0.85, 1.15), random.uniform(0, 10)
    noise = random.normal(1, random.uniform(0.02, 0.06), (3, SIDE, SIDE))
    return np.clip(COLORS[covers].transpose(2, 0, 1) * light * noise + haze, 5, 245)


def write(
    path: Path,
    values: np.ndarray,
    names: Sequence[str] = (),
    unit: Optional[Tuple[float, float]] = None,
    pixel: Optional[float] = 10.0,
    colors: Optional[Sequence[ColorInterp]] = None,
) -> str:
    warnings.simplefilter('ignore', rasterio.errors.NotGeoreferencedWarning)
    profile: Dict[str, Any] = dict(
        driver='GTiff', count=len(values), height=SIDE, width=SIDE, dtype=values.dtype
    )
    if pixel is not None:
        profile.update(crs='EPSG:32633', transform=from_origin(5e5, 5.4e6, pixel, pixel))
    with rasterio.open(path, 'w', photometric='MINISBLACK', **profile) as file:
        file.write(values)
        file.colorinterp = colors or [ColorInterp.undefined] * len(values)
        if names:
            file.descriptions = tuple(names)
        if unit is not None:
            file.scales, file.offsets = (unit[0],) * len(values), (unit[1],) * len(values)
    return str(path)


RGB = (ColorInterp.red, ColorInterp.green, ColorInterp.blue)
TRUE = (1e-4, 0.0)


def write_consistent(folder: Path, random: np.random.RandomState, aerial: bool, number: int) -> str:
    """Write a scene as training has it, with true metadata."""
    day = 20230601 + number % 28
    if aerial:
        values = draw_photo(random).astype(np.uint8)
        return write(folder / f'photo{number}.tif', values, pixel=0.3, colors=RGB)
    values = (draw_fields(random) * 1e4).astype(np.uint16)
    name = f'S2A_MSIL2A_{day}T100031_N0301_R122_T33UUP_{number}.tif'
    return write(folder / name, values, NAMES, TRUE)


def write_altered(folder: Path, random: np.random.RandomState, kind: str, state: str) -> str:
    """Write a scene that is unlike the training in one way, with absent, true or lying metadata."""
    told = state != 'absent'
    if KINDS[kind].aerial:
        photo = draw_photo(random)
        colors = RGB if told else None
        if kind == 'BGR':
            photo = photo[::-1]
            colors = RGB[::-1] if state == 'true' else colors
        else:
            low, high = (np.percentile(photo, share, (1, 2), keepdims=True) for share in (2, 98))
            photo = np.clip((photo - low) / (high - low), 0, 1) * 255
        return write(folder / 'x.tif', photo.astype(np.uint8), pixel=0.3, colors=colors)
    reflectance = draw_fields(random, kind == 'other season')
    values = (reflectance * 1e4).astype(np.uint16)
    names, unit, pixel = (NAMES, TRUE, 10.0) if told else ((), None, 10.0)
    file = 'S2A_MSIL2A_20230610T100031_N0301_R122_T33UUP_x.tif' if told else 'x.tif'
    if kind == 'wrong offset':
        values = values + np.uint16(1000)
        if state == 'true':
            unit, file = (1e-4, -0.1), file.replace('N0301', 'N0509')
    elif kind == 'wrong unit':
        values = reflectance.astype(np.float32)
        # A file of reflectances has no scale; its name stays that of the product only where it lies.
        unit, file = (unit, file) if state == 'lying' else (None, 'x.tif')
    elif kind == 'bands swapped':
        values = values[::-1]
        names = names[::-1] if state == 'true' else names
    elif kind == 'a band missing':
        if state == 'lying':
            values[3] = values[2]
        else:
            values = np.delete(values, 3, 0)
            names = tuple(np.delete(names, 3)) if names else ()
    elif kind == 'pixel size':
        pixel = {'absent': None, 'true': 30.0, 'lying': 10.0}[state]
    elif kind == '8 for 16 bits':
        values = np.clip(reflectance * 255, 0, 255).astype(np.uint8)
        unit, file = (unit, file) if state == 'lying' else (None, 'x.tif')
    elif kind == 'other sensor':
        values = ((reflectance + 0.2) / 2.75e-5).astype(np.uint16)
        if state == 'true':
            unit, file = (2.75e-5, -0.2), 'LC08_L2SP_192024_20230610_20230620_02_T1.tif'
    elif state == 'true':
        file = file.replace('20230610', '20231105')
    return write(folder / file, values, names, unit, pixel)


def make_passport(paths: Sequence[str]) -> Dict[str, Any]:
    rasters = [open_scene(path) for path in paths]
    part = describe_part(
        [facts_of(raster) for raster in rasters], [sample_quantiles(r) for r in rasters]
    )
    return dict(version=1, classes={}, parts={'': part})


def examine(path: str, passport: Dict[str, Any], count: int) -> Set[str]:
    """Return the kinds of what is said about a scene, as mapsage predict would."""
    door = Door(passport, False, lambda line: None)
    try:
        scene = Scene(path, door.bands_of(Bands(count, False)))
    except (GeoError, PredictError):
        # Only bands are checked before.
        return {'bands'}
    door.examine(scene)
    return set(door.findings) | ({'bands'} if facts_of(scene.raster).reordered else set())


def seed_of(root: str, *names: object) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32('/'.join([root, *map(str, names)]).encode()))


class Trainings:
    """Passports of trainings, each made once; trials take turns with them."""

    def __init__(self, root: str, folder: Path, crops: List[np.ndarray], count: int = 10) -> None:
        self._root, self._folder, self._crops, self._count = root, folder, crops, count
        self._passports: Dict[Tuple[str, int], Dict[str, Any]] = {}

    def write(self, kind: str, random: np.random.RandomState, number: int) -> str:
        """Write a scene as training has it."""
        if kind != 'photos':
            return write_consistent(self._folder, random, kind == 'town', number)
        crop = self._crops[random.randint(len(self._crops))]
        return write(self._folder / f'{number}.tif', crop, pixel=0.3, colors=RGB)

    def passport(self, kind: str, trial: int) -> Dict[str, Any]:
        """Return the passport of a training on fields, towns or photos."""
        key = kind, trial % self._count
        if key not in self._passports:
            random = seed_of(self._root, 'training', *key)
            paths = [self.write(kind, random, number) for number in range(TRAINED)]
            self._passports[key] = make_passport(paths)
        return self._passports[key]


def measure_kinds(root: str, trials: int, folder: Path, trainings: Trainings) -> None:
    print(
        '| kind | '
        + ' | '.join(f'{state}: found, named' for state in STATES)
        + ' | pixels show it |'
    )
    print('|---|' + '---|' * (len(STATES) + 1))
    for kind, altered in KINDS.items():
        cells = []
        for state in STATES:
            found = named = 0
            for trial in range(trials):
                path = write_altered(folder, seed_of(root, kind, state, trial), kind, state)
                passport = trainings.passport('town' if altered.aerial else 'fields', trial)
                kinds = examine(path, passport, 3 if altered.aerial else len(NAMES))
                found += bool(kinds)
                named += bool(kinds & altered.named)
            cells.append(f'{found}, {named}')
        shows = 'yes' if altered.shows else 'no'
        print(f'| {kind} | ' + ' | '.join(cells) + f' | {shows} |', flush=True)
    print(f'of {trials} trials each')


def measure_consistent(root: str, count: int, trainings: Trainings, has_photos: bool) -> None:
    warned: Dict[str, int] = {}
    for trial in range(count):
        kind = ('fields', 'town', 'photos')[trial % (3 if has_photos else 2)]
        path = trainings.write(kind, seed_of(root, 'consistent', trial), TRAINED)
        kinds = examine(path, trainings.passport(kind, trial), 6 if kind == 'fields' else 3)
        if kinds:
            text = f'{kind}: {", ".join(sorted(kinds))}'
            warned[text] = warned.get(text, 0) + 1
    print(f'{count} consistent scenes: {sum(warned.values())} warnings {warned or ""}', flush=True)


def read_crops(photos: Path) -> List[np.ndarray]:
    """Return crops (3, SIDE, SIDE) of the images in a folder, red first."""
    crops = []
    for path in sorted([*photos.rglob('*.png'), *photos.rglob('*.jpg')]):
        image = cv2.imread(str(path))
        if image is None or min(image.shape[:2]) < SIDE or np.ptp(image) < 20:
            continue
        top, left = ((side - SIDE) // 2 for side in image.shape[:2])
        crops.append(image[top : top + SIDE, left : left + SIDE, ::-1].transpose(2, 0, 1))
    return crops


class Clock:
    """Processor time of functions, of which only the outermost counts."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_running = False

    def watch(self, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_running:
                return function(*args, **kwargs)
            self._is_running, start = True, time.process_time()
            try:
                result = function(*args, **kwargs)
                return iter(list(result)) if isinstance(result, Iterator) else result
            finally:
                self.seconds += time.process_time() - start
                self._is_running = False

        setattr(owner, name, timed)


def show_share(subject: str, clock: Clock) -> None:
    """Print the share of the watched functions in this process, imports included."""
    total = time.process_time()
    print(
        f'{subject}: {clock.seconds:.2f} s of {total:.2f} s of processor time, '
        f'{100 * clock.seconds / total:.1f} %',
        flush=True,
    )


def start_training(folder: Path, count: int) -> None:
    """Train one step on the scenes of a folder, and print the share of the passport until then."""
    from mmengine.config import Config
    from mmengine.hooks import Hook

    from mapsage.datasets.geotiff import summary
    from mapsage.engine import MapSageRunner
    from mapsage.engine.loading import data_record
    from mapsage.geo import scene_facts

    clock = Clock()
    clock.watch(scene_facts, '_facts')
    clock.watch(GeoTiffDataset, '_check_units')
    clock.watch(summary, '_mixed_pixels')
    clock.watch(data_record, 'passport_of')

    class Started(Hook):
        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            show_share(f'start with {count} scenes', clock)

    cfg = Config.fromfile(str(ROOT / 'configs/geotiff/efficientnet_lite0_fpn_geotiff.py'))
    cfg.model.data_preprocessor.update(mean=[120.0] * 3, std=[60.0] * 3)
    cfg.model.backbone.update(in_channels=3, init_cfg=None)
    cfg.model.backbone.pop('bands')
    loader = dict(cfg.train_dataloader, num_workers=0, persistent_workers=False)
    loader['dataset'] = dict(
        loader['dataset'], data_root=str(folder), labels='labels', bands=None, split=None
    )
    cfg.merge_from_dict(dict(train_dataloader=loader, train_cfg=dict(max_iters=1, val_interval=9)))
    for part in ('dataloader', 'cfg', 'evaluator'):
        cfg[f'val_{part}'] = cfg[f'test_{part}'] = None
    cfg.custom_hooks = []
    cfg.env_cfg.accelerator, cfg.work_dir, cfg.log_level = 'cpu', str(folder / 'run'), 'ERROR'
    runner = MapSageRunner.from_cfg(cfg)
    runner.register_hook(Started())
    runner.train()


def predict_map(folder: Path, side: int) -> None:
    """Map one scene, and print the share of the passport."""
    import torch
    from mmengine.config import Config

    from mapsage.commands import cli, predict
    from mapsage.geo import scene_facts

    config = str(ROOT / 'configs/demo/efficientnet_lite0_fpn_demo.py')
    path = write_tile(folder / 'map/scene.tif', side)
    network = cli.build_model(Config.fromfile(config))
    passport = make_passport([str(path)])
    meta = dict(data=dict(passport=passport))
    torch.save(dict(state_dict=network.state_dict(), meta=meta), str(folder / 'model.pth'))
    clock = Clock()
    clock.watch(scene_facts, '_facts')
    clock.watch(Door, 'examine')
    clock.watch(Door, 'report')
    before = time.process_time()
    predict.main(
        [config, str(folder / 'model.pth'), str(path), '--out', str(folder / f'maps{side}')]
        + ['--accelerator', 'cpu']
    )
    total = time.process_time() - before
    print(
        f'map of {side} x {side} pixels: {clock.seconds:.3f} s of {total:.2f} s of processor time '
        f'without imports, {100 * clock.seconds / total:.2f} %',
        flush=True,
    )


def write_tile(path: Path, side: int, seed: int = 0) -> Path:
    """Write a compressed scene in red, green and blue."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.RandomState(seed)
    with rasterio.open(
        path, 'w', driver='GTiff', count=3, height=side, width=side, dtype='uint8', tiled=True,
        compress='deflate', crs='EPSG:32633', transform=from_origin(5e5, 5.4e6, 0.5, 0.5),
    ) as file:  # fmt: skip
        file.write(random.randint(0, 255, (3, side, side), np.uint8) // 8 * 8)
    return path


def measure_costs(folder: Path) -> None:
    """Print the shares of a first and a later start, and of maps; each in a process of its own."""
    environ = dict(os.environ, XDG_CACHE_HOME=str(folder / 'cache'), OMP_NUM_THREADS='1')
    for count in (1000, 8000):
        root = folder / str(count)
        # Names differ, content does not: links save the disk.
        for number in range(count):
            scene = root / f'scenes/{number}.tif'
            label = root / f'labels/{number}.tif'
            if number < 16:
                write_tile(scene, 1024, number)
                label.parent.mkdir(parents=True, exist_ok=True)
                with rasterio.open(scene) as file:
                    profile = dict(file.profile, count=1)
                with rasterio.open(label, 'w', **profile) as file:
                    file.write(np.full((1, 1024, 1024), number % 7, np.uint8))
            else:
                os.link(str(root / f'scenes/{number % 16}.tif'), str(scene))
                os.link(str(root / f'labels/{number % 16}.tif'), str(label))
        for kind in ('first', 'later'):
            print(kind, end=' ', flush=True)
            run_part(['--start', str(root)], environ)
        shutil.rmtree(str(root))
    for side in (1024, 3072):
        run_part(['--map', str(folder), '--side', str(side)], environ)


def run_part(arguments: Sequence[str], environ: Dict[str, str]) -> None:
    output = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    ).stdout
    lines = [line for line in output.splitlines() if ' of processor time' in line]
    print(lines[0] if lines else output[-2000:], flush=True)


def commit() -> str:
    return (
        subprocess.run(
            ['git', 'rev-parse', 'HEAD'], cwd=str(ROOT), stdout=subprocess.PIPE, check=True
        )
        .stdout.decode()
        .strip()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--trials', type=int, default=20)
    parser.add_argument('--consistent', type=int, default=500)
    parser.add_argument('--photos', type=Path, help='folder of real aerial images')
    parser.add_argument('--seed', help='text that replaces the hash of the commit')
    parser.add_argument('--costs', action='store_true', help='measure the costs only')
    parser.add_argument('--start', type=Path, help=argparse.SUPPRESS)
    parser.add_argument('--map', type=Path, help=argparse.SUPPRESS)
    parser.add_argument('--side', type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        start_training(args.start, len(list((args.start / 'scenes').glob('*.tif'))))
        return
    if args.map:
        predict_map(args.map, args.side)
        return
    root = args.seed or commit()
    print(
        f'{describe_machine()}; seed {hashlib.sha1(root.encode()).hexdigest()[:8]} of {root[:12]}'
    )
    with tempfile.TemporaryDirectory() as name:
        if not args.costs:
            crops = read_crops(args.photos) if args.photos else []
            trainings = Trainings(root, Path(name), crops)
            measure_kinds(root, args.trials, Path(name), trainings)
            measure_consistent(root, args.consistent, trainings, bool(crops))
        measure_costs(Path(name))


if __name__ == '__main__':
    main()
