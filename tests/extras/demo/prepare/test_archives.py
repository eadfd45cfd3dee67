"""tools/prepare_data.py: from a provider's archives to what MMSeg's classes read."""

from __future__ import annotations

import os
import re
import shutil
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import cv2
import mini_archives
import numpy as np
import pytest
from mmengine.registry import DATASETS, DefaultScope

from mapsage.extras.demo import prepare_data
from mapsage.extras.demo.prepare.archives import LEDGER, PrepareOptions, prepare_dataset
from mapsage.extras.demo.prepare.source_files import PrepareError

CLASS = dict(
    loveda='LoveDADataset', potsdam='PotsdamDataset', vaihingen='ISPRSDataset', isaid='iSAIDDataset'
)
CLIP = dict(
    loveda=PrepareOptions(),
    potsdam=PrepareOptions(32),
    vaihingen=PrepareOptions(32, 20),
    isaid=PrepareOptions(40, 32),
)
Write = Callable[[str, Path], mini_archives.Maps]

# x0, y0, x1, y1 in a tile's name
BOX = dict(potsdam=(0, 1, 2, 3), vaihingen=(0, 1, 2, 3), isaid=(2, 0, 3, 1))


@pytest.fixture(scope='module')
def deliveries(tmp_path_factory: pytest.TempPathFactory) -> Tuple[Path, Dict[str, Any]]:
    """Every delivery, written once, and the maps drawn; do not change them."""
    root = tmp_path_factory.mktemp('deliveries')
    return root, {name: getattr(mini_archives, f'write_{name}')(root / name) for name in CLASS}


@pytest.fixture
def write(deliveries: Tuple[Path, Dict[str, Any]]) -> Write:
    """Copies a delivery to a folder; returns its maps."""

    def copy(name: str, root: Path) -> mini_archives.Maps:
        shutil.copytree(str(deliveries[0] / name), str(root))
        return deliveries[1][name]

    return copy


def read(name: str, out: Path, split: str) -> Dict[str, Tuple[np.ndarray, np.ndarray]]:
    """Image (RGB) and class map of every sample, by file name, through MMSeg's class."""
    pipeline = [dict(type=t) for t in ('LoadImageFromFile', 'LoadAnnotations', 'PackSegInputs')]
    with DefaultScope.overwrite_default_scope('mmseg'):
        dataset = DATASETS.build(
            dict(
                type=CLASS[name],
                data_root=str(out),
                pipeline=pipeline,
                data_prefix=dict(img_path=f'img_dir/{split}', seg_map_path=f'ann_dir/{split}'),
            )
        )
        return {
            Path(sample['data_samples'].img_path).stem: (
                sample['inputs'].numpy()[::-1].transpose(1, 2, 0),
                sample['data_samples'].gt_sem_seg.data[0].numpy(),
            )
            for sample in dataset
        }


def listing(root: Path) -> Dict[str, int]:
    return {str(p.relative_to(root)): p.stat().st_mtime_ns for p in root.rglob('*') if p.is_file()}


def expected_tile(mask: np.ndarray, box: List[int]) -> np.ndarray:
    x0, y0, x1, y1 = box
    tile = np.full((y1 - y0, x1 - x0), 255, np.uint8)
    part = mask[y0:y1, x0:x1]
    tile[: part.shape[0], : part.shape[1]] = part
    return tile


@pytest.mark.parametrize('name', ['potsdam', 'vaihingen', 'isaid'])
def test_mmseg_reads_the_map_that_was_drawn(name: str, tmp_path: Path, write: Write) -> None:
    maps = write(name, tmp_path / 'source')
    prepare_dataset(name, tmp_path / 'source', tmp_path / 'out', CLIP[name], workers=2)
    for split, drawn in maps.items():
        covered = {key: np.zeros(mask.shape, bool) for key, mask in drawn.items()}
        for tile, (_, labels) in read(name, tmp_path / 'out', split).items():
            key, *box = tile.rsplit('_', 4)
            x0, y0, x1, y1 = (int(box[i]) for i in BOX[name])
            np.testing.assert_array_equal(labels, expected_tile(drawn[key], [x0, y0, x1, y1]))
            covered[key][y0:y1, x0:x1] = True
        assert all(c.all() for c in covered.values())


def test_loveda_is_read_as_drawn(tmp_path: Path, write: Write) -> None:
    maps = write('loveda', tmp_path / 'source')
    done = prepare_dataset('loveda', tmp_path / 'source', tmp_path / 'out')
    assert done.images == {'test': 4, 'train': 4, 'val': 4}
    for split, drawn in maps.items():
        samples = read('loveda', tmp_path / 'out', split)
        assert samples.keys() == drawn.keys()
        for number, (_, labels) in samples.items():
            np.testing.assert_array_equal(labels, drawn[number])
    assert len(list((tmp_path / 'out/img_dir/test').iterdir())) == 4
    assert not (tmp_path / 'out/ann_dir/test').exists()


def test_images_keep_their_pixels(tmp_path: Path, write: Write) -> None:
    """Vaihingen's bands stay infrared, red, green; a gray image of DOTA's is repeated."""
    write('vaihingen', tmp_path / 'v')
    prepare_dataset('vaihingen', tmp_path / 'v', tmp_path / 'vout', CLIP['vaihingen'])
    source, _ = mini_archives.draw(3, 44, 36, 6)
    image = read('vaihingen', tmp_path / 'vout', 'train')['area3_12_4_44_36'][0]
    np.testing.assert_array_equal(image, source[4:36, 12:44])
    write('isaid', tmp_path / 'i')
    prepare_dataset('isaid', tmp_path / 'i', tmp_path / 'iout', CLIP['isaid'])
    images = read('isaid', tmp_path / 'iout', 'train')
    gray, _ = mini_archives.draw(1, 30, 60, 16)
    alpha, _ = mini_archives.draw(2, 30, 60, 16)
    np.testing.assert_array_equal(
        images['P0001_20_60_0_40'][0][:, :30], gray[20:60, :, :1].repeat(3, 2)
    )
    np.testing.assert_array_equal(images['P0002_0_40_0_40'][0][:, :30], alpha[:40])
    assert not images['P0002_0_40_0_40'][0][:, 30:].any()
    whole = cv2.imread(str(tmp_path / 'iout/img_dir/test/P0006.png'))
    np.testing.assert_array_equal(whole[..., ::-1], mini_archives.draw(6, 70, 50, 16)[0])


def test_unpacked_folders_give_the_same(tmp_path: Path, write: Write) -> None:
    write('potsdam', tmp_path / 'zipped')
    for archive in (tmp_path / 'zipped').iterdir():
        with zipfile.ZipFile(str(archive)) as file:
            file.extractall(str(tmp_path / 'plain' / archive.stem))
    for source in ('zipped', 'plain'):
        prepare_dataset('potsdam', tmp_path / source, tmp_path / f'out_{source}', CLIP['potsdam'])
    outs = [tmp_path / f'out_{source}' for source in ('zipped', 'plain')]
    assert listing(outs[0]).keys() == listing(outs[1]).keys()
    name = 'ann_dir/val/7_13_8_8_40_40.png'
    assert (outs[0] / name).read_bytes() == (outs[1] / name).read_bytes()


def run_tool(*arguments: object) -> int:
    return prepare_data.main([str(a) for a in arguments])


def test_a_stopped_run_goes_on_and_a_finished_one_is_kept(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture
) -> None:
    source, out = tmp_path / 'source', tmp_path / 'out'
    write('potsdam', source)
    prepare_dataset('potsdam', source, out, CLIP['potsdam'])
    complete = listing(out)
    # As a kill leaves it: half of the ledger with a torn line, a tile missing, a part file.
    lines = (out / LEDGER).read_text().splitlines(True)
    (out / LEDGER).write_text(''.join(lines[:10]) + lines[10][:20])
    gone = [out / 'img_dir/val/7_13_0_0_32_32.png', out / 'ann_dir/train/2_10_8_8_40_40.png']
    for path in gone:
        path.unlink()
    (out / '.extracted-x').mkdir()
    assert run_tool('potsdam', source, '--out', out, '--clip-size', 32, '--workers', 2) == 0
    said = capsys.readouterr()
    assert '24 train, 14 val; 2 files written' in said.out and 'potsdam: 30/30 images' in said.err
    again = listing(out)
    assert again.keys() == complete.keys() and not list(out.glob('.extracted*'))
    changed = {name for name in again if again[name] != complete[name]}
    assert changed == {LEDGER, *(str(path.relative_to(out)) for path in gone)}
    assert run_tool('potsdam', source, '--out', out, '--clip-size', 32) == 0
    assert 'already complete' in capsys.readouterr().out
    assert listing(out) == again
    assert run_tool('potsdam', tmp_path / 'lost', '--out', out, '--clip-size', 32) == 1
    assert 'lost does not exist' in capsys.readouterr().err


def _remove(name: str) -> Callable[[Path], None]:
    return lambda source: (source / name).unlink()


def _truncate(name: str) -> Callable[[Path], None]:
    return lambda source: os.truncate(str(source / name), (source / name).stat().st_size // 2)


def _replace_member(archive: str, member: str, data: bytes) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        with zipfile.ZipFile(str(source / archive)) as file:
            members = {n: file.read(n) for n in file.namelist()}
        members[member] = data
        mini_archives.write_zip(source / archive, {n: d for n, d in members.items() if d})

    return change


def _flip_bytes(archive: str) -> Callable[[Path], None]:
    """Damage compressed data in the middle; the directory at the end stays whole."""

    def change(source: Path) -> None:
        with zipfile.ZipFile(str(source / archive)) as file:
            info = max(file.infolist(), key=lambda i: i.compress_size)
        data = bytearray((source / archive).read_bytes())
        at = info.header_offset + 100
        data[at : at + 40] = bytes(b ^ 255 for b in data[at : at + 40])
        (source / archive).write_bytes(bytes(data))

    return change


def _mark(archive: str, at: Tuple[int, int], value: int) -> Callable[[Path], None]:
    """Set a field in both headers of every member: 6, 8 flags; 8, 10 method of compression."""

    def change(source: Path) -> None:
        data = bytearray((source / archive).read_bytes())
        with zipfile.ZipFile(str(source / archive)) as file:
            places = [info.header_offset + at[0] for info in file.infolist()]
            place = file.start_dir
            for _ in file.infolist():
                places.append(place + at[1])
                place = data.find(b'PK\x01\x02', place + 4)
        for place in places:
            data[place] = value
        (source / archive).write_bytes(bytes(data))

    return change


def _nest(source: Path) -> None:
    for archive in sorted(source.glob('*.zip')):
        mini_archives.write_zip(source / 'Potsdam.zip', {archive.name: archive.read_bytes()})
        archive.unlink()


OFF = mini_archives.paint(np.full((40, 40), 4, np.uint8), mini_archives.ISPRS)
OFF[20, 7] = (252, 255, 0)


def _huge_png() -> bytes:
    """Return a PNG of 40,000 x 40,000 pixels, of which the first rows are there."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', checksum)

    return (
        b'\x89PNG\r\n\x1a\n'
        + chunk(b'IHDR', struct.pack('>IIBBBBB', 40000, 40000, 8, 0, 0, 0, 0))
        + chunk(b'IDAT', zlib.compress(bytes(1000)))
        + chunk(b'IEND', b'')
    )


LABELS = '5_Labels_all_noBoundary.zip'


@pytest.mark.parametrize(
    'name, change, message',
    [
        ('potsdam', shutil.rmtree, 'does not exist.*downloaded archives'),
        (
            'potsdam',
            _remove('2_Ortho_RGB.zip'),
            r'holds no 2_Ortho_RGB.zip.*archives: 5_Labels_all_no',
        ),
        ('potsdam', _remove(LABELS), 'holds no 5_Labels_all_noBoundary.zip or 5_Labels_all.zip'),
        ('potsdam', _truncate('2_Ortho_RGB.zip'), r'RGB.zip \(\d+ bytes\) is not a complete zip'),
        ('potsdam', _nest, r'Unpack the archives in the archive first: Potsdam.zip: 5_Labels'),
        (
            'potsdam',
            _replace_member('2_Ortho_RGB.zip', '2_Ortho_RGB/top_potsdam_6_7_RGB.tif', b''),
            r'lacks 1 of 38 images: top_potsdam_6_7_RGB.tif',
        ),
        (
            'potsdam',
            _replace_member(LABELS, 'top_potsdam_6_7_label_noBoundary.tif', b''),
            'no label for 1 of 38 images: 6_7',
        ),
        (
            'potsdam',
            _replace_member(LABELS, 'top_potsdam_6_7_label_noBoundary.tif', b'no picture'),
            r'top_potsdam_6_7_label_noBoundary.tif cannot be decoded',
        ),
        (
            'potsdam',
            _replace_member(
                LABELS, 'top_potsdam_6_7_label_noBoundary.tif', mini_archives.tif(OFF[:32])
            ),
            '40 x 40 pixels, its label .*40 x 32',
        ),
        (
            'potsdam',
            _replace_member(LABELS, 'top_potsdam_6_7_label_noBoundary.tif', mini_archives.tif(OFF)),
            r'top_potsdam_6_7_label_noBoundary.tif: pixel \(column 7, row 20\) has the color '
            r'\(252, 255, 0\).*--ignore-other-colors',
        ),
        ('potsdam', _flip_bytes('2_Ortho_RGB.zip'), 'RGB.tif cannot be unpacked.*damaged'),
        (
            'potsdam',
            _mark('2_Ortho_RGB.zip', (6, 8), 1),
            'RGB.tif cannot be unpacked here .*encrypted.*another program',
        ),
        ('potsdam', _mark(LABELS, (8, 10), 99), 'cannot be unpacked here .*another program'),
        (
            'vaihingen',
            _remove('ISPRS_semantic_labeling_Vaihingen_ground_truth_eroded_COMPLETE.zip'),
            'holds no ISPRS_semantic_labeling_Vaihingen_ground_truth_eroded_COMPLETE',
        ),
        (
            'loveda',
            _replace_member(
                'Train.zip',
                'Train/Urban/masks_png/2.png',
                mini_archives.png(np.full((8, 8), 9, np.uint8)),
            ),
            r'masks_png/2.png has the shape \(8, 8\).*values up to 9.*1 to 7',
        ),
        (
            'loveda',
            _replace_member('Train.zip', 'Train/Urban/masks_png/2.png', _huge_png()),
            'masks_png/2.png cannot be decoded; expected one band of uint8',
        ),
        (
            'loveda',
            _replace_member(
                'Val.zip',
                'Val/Urban/images_png/6.png',
                mini_archives.png(np.zeros((9, 9, 3), np.uint8))[:-20],
            ),
            r'images_png/6.png \(\d+ bytes\) is not a complete PNG',
        ),
        (
            'loveda',
            _replace_member('Train.zip', 'Train/Urban/masks_png/2.png', b''),
            'no label for 1 of 8 images: Train/2',
        ),
        (
            'isaid',
            _remove('val/Semantic_masks/images.zip'),
            'no label for 3 of 6 images: val/P0003',
        ),
    ],
)
def test_deliveries_that_are_refused(
    name: str, change: Callable[[Path], None], message: str, tmp_path: Path, write: Write
) -> None:
    write(name, tmp_path / 'source')
    change(tmp_path / 'source')
    with pytest.raises(PrepareError, match=re.compile(message, re.DOTALL)):
        prepare_dataset(name, tmp_path / 'source', tmp_path / 'out', CLIP[name], workers=2)
    assert not list(tmp_path.rglob('*.partial-*'))


def test_other_colors_are_ignored_when_asked_for(tmp_path: Path, write: Write) -> None:
    write('potsdam', tmp_path / 'source')
    member = 'top_potsdam_6_7_label_noBoundary.tif'
    _replace_member(LABELS, member, mini_archives.tif(OFF))(tmp_path / 'source')
    done = prepare_dataset(
        'potsdam',
        tmp_path / 'source',
        tmp_path / 'out',
        PrepareOptions(32, 32, ignore_other_colors=True),
    )
    assert done.other_colors == 1  # though two strips hold it
    for name, row in (('6_7_0_8_32_40', 20 - 8), ('6_7_0_0_32_32', 20)):
        labels = read('potsdam', tmp_path / 'out', 'train')[name][1]
        assert labels[row, 7] == 255
        assert (np.delete(labels.ravel(), row * 32 + 7) == 4).all()


@pytest.mark.parametrize(
    'name, options, message',
    [
        ('loveda', PrepareOptions(512), 'loveda is not cut'),
        ('potsdam', PrepareOptions(32, 40), 'clip_size=32 with stride=40'),
        ('mars', PrepareOptions(), "'mars' is not known.*'isaid', 'loveda'"),
    ],
)
def test_options_that_are_refused(
    name: str, options: PrepareOptions, message: str, tmp_path: Path
) -> None:
    with pytest.raises(PrepareError, match=message):
        prepare_dataset(name, tmp_path, tmp_path / 'out', options)


def test_an_occupied_folder_is_left_alone(tmp_path: Path, write: Write) -> None:
    write('loveda', tmp_path / 'source')
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'thesis.txt').write_text('years of work')
    with pytest.raises(PrepareError, match=f'mine is in use and has no {LEDGER}'):
        prepare_dataset('loveda', tmp_path / 'source', tmp_path / 'mine')
    assert [p.name for p in (tmp_path / 'mine').iterdir()] == ['thesis.txt']
    write('isaid', tmp_path / 'other')
    prepare_dataset('isaid', tmp_path / 'other', tmp_path / 'out', CLIP['isaid'])
    with pytest.raises(PrepareError, match="'clip_size': 40.*asked for now.*'clip_size': 36"):
        prepare_dataset('isaid', tmp_path / 'other', tmp_path / 'out', PrepareOptions(36))
