"""Largest resident set of tools/predict.py for a large scene, with all that a map may have.

    python tools/benchmarks/scene_memory.py [--width 20000] [--height 20000] [--config CONFIG]
                                            [--classes 150] [--options --confidence --polygons]

Memory depends on the width of a scene, the side of a window and the number of classes, and on the
model. Without a config the model is some classes of averages of 16 pixels, which cost little, so
that all of a large scene can be tried; with one, a scene of few rows says what its model adds.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import numpy as np  # noqa: E402
import rasterio  # noqa: E402
import torch  # noqa: E402
from _common import describe_machine  # noqa: E402
from mmengine.model import BaseModule  # noqa: E402
from mmseg.registry import MODELS  # noqa: E402
from rasterio.windows import Window  # noqa: E402

from mapsage.commands import cli  # noqa: E402
from mapsage.commands.cli import build_model  # noqa: E402
from mapsage.extras.demo.demo_scenes import SCENE_KINDS, draw_scene  # noqa: E402

TILE = 512
CONFIG = """
custom_imports = dict(imports=['mapsage', 'scene_memory'])
default_scope = 'mmseg'
test_dataloader = dict(dataset=dict(type='BaseSegDataset', metainfo=dict(
    classes=[str(i) for i in range(COUNT)], palette=[[i] * 3 for i in range(COUNT)])))
model = dict(
    type='EncoderDecoder', backbone=dict(type='Averages'),
    data_preprocessor=dict(type='SegDataPreProcessor', mean=[100.] * 3, std=[40.] * 3),
    decode_head=dict(
        type='FCNHead', in_channels=3, in_index=0, channels=3, num_convs=0, concat_input=False,
        dropout_ratio=0, num_classes=COUNT, align_corners=False),
    train_cfg=dict(), test_cfg=dict(mode='whole'))
"""


@MODELS.register_module(force=True)
class Averages(BaseModule):
    """Averages of squares of 16 pixels: no computation to speak of."""

    def forward(self, image: torch.Tensor) -> tuple:
        return (torch.nn.functional.avg_pool2d(image, 16),)


def write_scene(path: Path, width: int, height: int) -> None:
    """Write drawn aerial scenes side by side, in UTM."""
    pictures = [
        draw_scene(seed, kind, 640, no_data=False)[0][:TILE, :TILE].transpose(2, 0, 1)
        for seed, kind in enumerate(list(SCENE_KINDS) * 3)
    ]
    random = np.random.RandomState(0)
    with rasterio.open(
        path,
        'w',
        driver='GTiff',
        width=width,
        height=height,
        count=3,
        dtype='uint8',
        crs='EPSG:32633',
        tiled=True,
        blockxsize=TILE,
        transform=rasterio.Affine(0.3, 0, 4e5, 0, -0.3, 5e6),
        blockysize=TILE,
        compress='deflate',
        zlevel=1,
        bigtiff='IF_SAFER',
    ) as file:
        for row in range(0, height, TILE):
            for column in range(0, width, TILE):
                picture = pictures[random.randint(len(pictures))]
                rows, columns = min(TILE, height - row), min(TILE, width - column)
                file.write(picture[:, :rows, :columns], window=Window(column, row, columns, rows))


def main() -> None:
    """Write scene and weights, run the command, and print what the kernel counted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--width', type=int, default=20000)
    parser.add_argument('--height', type=int, default=20000)
    parser.add_argument('--window', type=int, default=512)
    parser.add_argument('--classes', type=int, default=7, help='classes of the model of averages')
    parser.add_argument('--config', help='config of a model (default: averages of pixels)')
    parser.add_argument(
        '--options',
        nargs=argparse.REMAINDER,
        default=['--confidence', '--polygons'],
        help='options of tools/predict.py',
    )
    args = parser.parse_args()
    print(describe_machine(), f'rasterio {rasterio.__version__}', sep=', ')
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / 'averages.py' if args.config is None else Path(args.config).resolve()
        if args.config is None:
            config.write_text(CONFIG.replace('COUNT', str(args.classes)))
        write_scene(folder / 'scene.tif', args.width, args.height)
        torch.manual_seed(0)
        model = build_model(cli.load_config(cli.build_parser('').parse_args([str(config)])))
        for parameter in model.decode_head.parameters():
            torch.nn.init.normal_(parameter)
        torch.save(dict(state_dict=model.state_dict(), meta={}), folder / 'model.pth')
        log, start = folder / 'log', time.monotonic()
        process = os.fork()
        if process == 0:
            with open(log, 'w') as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.environ['PYTHONPATH'] = str(ROOT / 'tools' / 'benchmarks')
            os.execv(
                sys.executable,
                [
                    sys.executable,
                    str(ROOT / 'tools' / 'predict.py'),
                    str(config),
                    str(folder / 'model.pth'),
                    str(folder / 'scene.tif'),
                    '--out',
                    str(folder / 'maps'),
                    '--window',
                    str(args.window),
                    '--accelerator',
                    'cpu',
                    *args.options,
                ],
            )
        _, status, usage = os.wait4(process, 0)
        print(log.read_text()[-1500:])
        if status:
            sys.exit('the command failed')
        print(
            f'{args.width:,} x {args.height:,} pixels, {" ".join(args.options)}: largest '
            f'resident set {usage.ru_maxrss / 1e6:.2f} GB, {time.monotonic() - start:.0f} s'
        )


if __name__ == '__main__':
    main()
