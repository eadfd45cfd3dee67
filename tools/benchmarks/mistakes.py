"""People's mistakes: what a training and the doctor say of each, and after how many seconds.

    python tools/benchmarks/mistakes.py                     the table of docs/reference/mistakes.md
    python tools/benchmarks/mistakes.py --only numcls_fewer

Each mistake is a training and a doctor in forks of one process that has imported everything, on 12
drawn tiles. The rows are those of tests/unit/engine/mistakes.tsv, and mistakes that need files or a
command line, which are below. Needs Linux. The exit status is 1 if a sentence did not come.
"""

import argparse
import io
import os
import re
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, Callable, List, NamedTuple, Sequence

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

CONFIG = """_base_ = ['mapsage::_base_/default_runtime.py', 'mapsage::_base_/efficientnet_lite0_fpn.py']
classes = ('ground', 'house', 'water')
palette = [[120, 160, 90], [200, 60, 40], [40, 90, 200]]
train_pipeline = [
    dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'),
    dict(type='RandomCrop', crop_size=(64, 64)), dict(type='RandomFlip', prob=0.5),
    dict(type='PackSegInputs')]
test_pipeline = [
    dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), dict(type='PackSegInputs')]
dataset = dict(
    type='BaseSegDataset', data_root='data', img_suffix='.png', seg_map_suffix='.png',
    metainfo=dict(classes=classes, palette=palette))
train_dataloader = dict(
    batch_size=2, num_workers=0, sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        **dataset, data_prefix=dict(img_path='images/train', seg_map_path='masks/train'),
        pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=1, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        **dataset, data_prefix=dict(img_path='images/val', seg_map_path='masks/val'),
        pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = [dict(type='ConfusionMatrixMetric', iou_metrics=['mIoU'])]
test_evaluator = val_evaluator
model = dict(
    data_preprocessor=dict(size=(64, 64)), backbone=dict(init_cfg=None),
    decode_head=dict(num_classes=len(classes)))
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-3))
param_scheduler = []
train_cfg = dict(max_iters=2, val_interval=2)
default_hooks = dict(checkpoint=dict(interval=2), logger=dict(interval=1))
randomness = dict(seed=0)
"""


def _pictures(part: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[], None]:
    """Return a function that changes all pictures of ``images`` or ``masks``."""

    def apply() -> None:
        for path in Path('data', part).rglob('*.png'):
            Image.fromarray(change(np.array(Image.open(path)))).save(path)

    return apply


def _write(path: str, content: bytes) -> Callable[[], Any]:
    return lambda: Path(path).write_bytes(content)


def _shrink_mask() -> None:
    path = 'data/masks/train/t_03.png'
    Image.open(path).resize((32, 32)).save(path)


def _remove_validation() -> None:
    for path in Path('data').glob('*/val/*.png'):
        path.unlink()


def _palette_masks(masks: np.ndarray) -> np.ndarray:
    colors = np.array([[0, 0, 0, 255], [255, 0, 0, 255], [0, 0, 255, 255]], np.uint8)
    return colors[masks]


class Mistake(NamedTuple):
    """A mistake: what is done, and the sentence that is right.

    Attributes:
        name: Name of the row.
        sentence: Text that the output must contain.
        prepare: What happens to the files, in the folder of the run.
        edit: Old and new text in the config.
        arguments: Command line after the config.
        config: Path of the config, for a wrong one.
        before: What commit b5f4341 said; the rows below have it in mistakes_before.tsv.
        text: Whole config, for a row of mistakes.tsv.
        doctor: Whether the doctor can know it: not what only the command line of a training has.
    """

    name: str
    sentence: str
    prepare: Callable[[], Any] = lambda: None
    edit: Sequence[str] = ()
    arguments: Sequence[str] = ()
    config: str = 'config.py'
    before: str = ''
    text: str = CONFIG
    doctor: bool = True


MISTAKES = [
    Mistake('right', 'score: aAcc', doctor=False),
    Mistake(
        'numcls_fewer',
        'has num_classes=2, and BaseSegDataset has 3 classes (ground, house, water); set num_classes=3',
        edit=('num_classes=len(classes)', 'num_classes=2'),
    ),
    Mistake(
        'own_numcls_more',
        'has num_classes=5, and BaseSegDataset has 3 classes',
        edit=('num_classes=len(classes)', 'num_classes=5'),
    ),
    Mistake(
        'onebased',
        'holds the value 3',
        _pictures('masks', lambda masks: masks + 1),
    ),
    Mistake(
        '255class',
        '255, which is ignored: they are neither trained nor scored',
        _pictures('masks', lambda masks: np.where(masks == 1, 255, masks % 255).astype(np.uint8)),
    ),
    Mistake(
        'own_class_never',
        'masks is water. A class that does not occur is not learned',
        _pictures('masks', lambda masks: masks % 2),
    ),
    Mistake('rgba_mask', 'has 4 channels, expected one', _pictures('masks', _palette_masks)),
    Mistake('size_mismatch', 'has 32x32 pixels and image', _shrink_mask),
    Mistake('empty_val', 'found no samples under', _remove_validation),
    Mistake(
        'symlink_loop',
        'is a symbolic link that leads back into its own folder',
        lambda: os.symlink('.', 'data/images/train/loop'),
    ),
    Mistake(
        'own_data_root',
        'data/nowhere',
        edit=("data_root='data'", "data_root='data/nowhere'"),
    ),
    Mistake(
        'own_suffix', 'found no samples under', edit=("img_suffix='.png'", "img_suffix='.jpg'")
    ),
    Mistake('own_mask_missing', 't_03.png', lambda: os.remove('data/masks/train/t_03.png')),
    Mistake(
        'own_mask_is_no_picture', 't_03.png', _write('data/masks/train/t_03.png', b'no picture')
    ),
    Mistake(
        'own_weights_are_text',
        "load_from='page.pth' begins with b'<!DOCTYPE html>': expected the path or URL of a checkpoint. "
        'Correct the path, or set load_from=None.',
        _write('page.pth', b'<!DOCTYPE html>'),
        arguments=('--cfg-options', 'load_from=page.pth'),
    ),
    Mistake('own_image_is_empty', 't_03.png', _write('data/images/train/t_03.png', b'')),
    Mistake(
        'crop_larger',
        'is larger than its images (64 x 64 pixels, height x width)',
        edit=('crop_size=(64, 64)', 'crop_size=(128, 128)'),
    ),
    Mistake(
        'crop_int',
        'model.data_preprocessor.size=128: expected (HEIGHT, WIDTH)',
        edit=('dict(size=(64, 64)', 'dict(size=128'),
    ),
    Mistake(
        'no_val_evaluator',
        'a validation needs all three',
        edit=(
            'test_evaluator = val_evaluator',
            'test_evaluator = val_evaluator\nval_evaluator = None',
        ),
    ),
    Mistake(
        'regtype',
        "type='RandomFlipp' is no known transform. Did you mean 'RandomFlip'?",
        edit=("type='RandomFlip'", "type='RandomFlipp'"),
    ),
    Mistake(
        'regds',
        "type='BaseSegDatset' is no known dataset. Did you mean 'BaseSegDataset'?",
        edit=("type='BaseSegDataset'", "type='BaseSegDatset'"),
    ),
    Mistake(
        'metric',
        "is no known metric. Did you mean 'ConfusionMatrixMetric'?",
        edit=('ConfusionMatrixMetric', 'ConfusionMatrixMetrics'),
    ),
    Mistake(
        'own_metric_fails',
        'the first validation would fail: FewestPixels',
        edit=(
            "val_evaluator = [dict(type='ConfusionMatrixMetric', iou_metrics=['mIoU'])]",
            "custom_imports = dict(imports=['fewest_pixels'])\n"
            "val_evaluator = [dict(type='FewestPixels')]",
        ),
        prepare=_write(
            'fewest_pixels.py',
            b'from mmengine.evaluator import BaseMetric\n'
            b'from mmengine.registry import METRICS\n\n'
            b'@METRICS.register_module(force=True)\n'
            b'class FewestPixels(BaseMetric):\n'
            b'    def process(self, data_batch, data_samples):\n'
            b"        self.results += [sample['pred_sem_segs'] for sample in data_samples]\n"
            b'    def compute_metrics(self, results):\n'
            b'        return dict(fewest=1)\n',
        ),
    ),
    Mistake(
        'save_best_miou',
        "save_best='miou': no metric of val_evaluator gives this score. Did you mean 'mIoU'?",
        edit=('checkpoint=dict(interval=2)', "checkpoint=dict(interval=2, save_best='miou')"),
    ),
    Mistake(
        'opts_typo',
        "IterBasedTrainLoop has no setting 'max_iter'. Did you mean 'max_iters'?",
        edit=('max_iters=2', 'max_iters=2, max_iter=5'),
    ),
    Mistake('no_such_config', 'config file confg.py does not exist.', config='confg.py'),
    Mistake('config_is_folder', 'data is a folder, expected a config file', config='data'),
    Mistake(
        'config_is_png',
        "is no config: its name ends in '.png'",
        config='data/images/train/t_00.png',
    ),
    Mistake(
        'nocuda', "accelerator 'cuda' cannot be used here", arguments=['--accelerator', 'cuda']
    ),
    Mistake('badaccel', "unknown accelerator 'gpu'", arguments=['--accelerator', 'gpu']),
    Mistake(
        'opts_noeq',
        'expected KEY=VALUE without a space around =',
        arguments=['--cfg-options', 'train_cfg.max_iters', '5'],
    ),
    Mistake(
        'own_opts_dict',
        'Set a dict key by key (optimizer.lr=0.1)',
        arguments=['--cfg-options', "custom_hooks=[dict(type='EMAHook', momentum=0.1)]"],
    ),
    Mistake(
        'work_dir_file',
        'is a file. Expected a folder that can be written',
        arguments=['--work-dir', 'config.py'],
    ),
    Mistake(
        'resume_nothing',
        'holds no checkpoint (iter_N.pth or epoch_N.pth)',
        arguments=['--resume', 'must'],
        doctor=False,
    ),
    Mistake(
        'own_four_means',
        '4 value(s) of mean and 3 of std',
        edit=('dict(size=(64, 64)', 'dict(mean=[1, 2, 3, 4], size=(64, 64)'),
    ),
]


class Outcome(NamedTuple):
    """What a program did: status, seconds of processor time, tracebacks, and its output."""

    status: int
    seconds: float
    tracebacks: int
    output: str


def _run(program: Callable[..., Any], arguments: List[str]) -> Outcome:
    """Run a program in a fork, for at most a minute."""
    from mapsage.commands import cli

    with tempfile.TemporaryFile('w+', errors='replace') as log:
        child = os.fork()
        if not child:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
            for name in ('stdout', 'stderr'):
                file = io.TextIOWrapper(open(1, 'wb', 0, closefd=False), write_through=True)
                setattr(sys, name, file)
            status = 1
            signal.alarm(60)
            sys.argv = ['program.py', *arguments]
            try:
                # It prints an error as the commands do, and exits.
                cli.run(program)
            except SystemExit as end:
                if isinstance(end.code, str):
                    print(end.code)
                status = 1 if isinstance(end.code, str) else end.code or 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        _, wait_status, usage = os.wait4(child, 0)
        log.seek(0)
        text = log.read()
    status = os.WEXITSTATUS(wait_status) if os.WIFEXITED(wait_status) else -1
    seconds = usage.ru_utime + usage.ru_stime
    return Outcome(status, seconds, text.count('Traceback (most recent call last)'), text)


def _contains(outcome: Outcome, sentence: str) -> bool:
    # Lines of the doctor are broken.
    return ' '.join(sentence.split()) in ' '.join(outcome.output.split())


def _line(outcome: Outcome, sentence: str) -> str:
    """Return the line with the sentence, else the last line."""
    lines = [line for line in outcome.output.splitlines() if line.strip()] or ['(no output)']
    line = next((line for line in lines if sentence[:60] in line), lines[-1])
    line = re.sub(r'^\S+ \S+ - mmengine - ', '', line)
    return line.replace('|', r'\|').replace('<', '&lt;').replace('*', r'\*')[:230]


def _read_rows() -> List[Mistake]:
    from tests.unit.engine.test_config_values import CONFIG as TABLE_CONFIG
    from tests.unit.engine.test_config_values import ROWS

    mistakes = []
    for name, edit, sentence, before in ROWS:
        old, arrow, new = edit.partition('=>')
        mistakes.append(
            Mistake(
                name,
                sentence.strip(),
                edit=(old.strip(), new.strip()) if arrow else (),
                arguments=() if arrow else ('--cfg-options', edit),
                before=before,
                text=TABLE_CONFIG,
            )
        )
    return mistakes


def _make_tiles() -> None:
    random = np.random.RandomState(0)
    colors = np.array([[100, 110, 90], [200, 40, 40], [20, 80, 200]])
    for number in range(12):
        mask = np.zeros((64, 64), np.uint8)
        mask[8:30, 8:40], mask[40:60, 20:60] = 1, 2
        image = np.clip(colors[mask] + random.normal(0, 12, (64, 64, 3)), 0, 255).astype(np.uint8)
        for kind, array in (('images', image), ('masks', mask)):
            folder = Path('data', kind, 'train' if number < 8 else 'val')
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(folder / f't_{number:02}.png')


def main() -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--only', nargs='*', default=[], help='names of rows (default: all)')
    args = parser.parse_args()
    from _common import describe_machine

    rows = _read_rows()
    # A row of the table is not repeated.
    rows += [row for row in MISTAKES if row.name not in {other.name for other in rows}]
    rows = [row for row in rows if not args.only or row.name in args.only]
    text = (Path(__file__).parent / 'mistakes_before.tsv').read_text(encoding='utf-8')
    before = dict(line.split('\t') for line in text.splitlines() if not line.startswith('#'))
    import mmseg.datasets  # noqa: F401
    import mmseg.evaluation  # noqa: F401
    import mmseg.models  # noqa: F401

    import mapsage.engine  # noqa: F401
    from mapsage.commands import doctor, train
    from mapsage.commands.doctor import diagnosis  # noqa: F401

    missed = []
    print(f'{describe_machine()}; seconds of processor time after the imports.\n')
    print('| mistake | what a training says | training | doctor | before |')
    print('|---|---|---|---|---|')
    for row in rows:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            sys.path.insert(0, folder)
            _make_tiles()
            text = row.text
            if row.edit:
                assert row.edit[0] in text, row
                text = text.replace(row.edit[0], row.edit[1], 1)
            Path('config.py').write_text(text, encoding='utf-8')
            row.prepare()
            cells = []
            for name, program in (('training', train.main), ('doctor', doctor.main)):
                if name == 'doctor' and not row.doctor:
                    cells.append('-')
                    continue
                arguments = [row.config, *row.arguments]
                if '--work-dir' not in arguments:
                    arguments[1:1] = ['--work-dir', 'run']
                outcome = _run(program, arguments)
                said = _contains(outcome, row.sentence)
                if not said or outcome.tracebacks or outcome.seconds > 10:
                    missed.append(f'{row.name} ({name}): {_line(outcome, row.sentence)}')
                cells.append(
                    f'{"said" if said else "**not said**"}, {outcome.seconds:.1f} s, status '
                    f'{outcome.status}'
                    + f', {outcome.tracebacks} traceback(s)'
                    * bool(outcome.tracebacks)
                )
                if name == 'training':
                    sentence = _line(outcome, row.sentence).replace(f'{folder}/', '')
            said_before = row.before or before.get(row.name, '')
            print(f'| {row.name} | {sentence} | {" | ".join(cells)} | {said_before} |', flush=True)
            sys.path.remove(folder)
            os.chdir(str(ROOT))
    print(f'\n{len(rows)} rows, {len(missed)} not as they should be.', *missed, sep='\n')
    return 1 if missed else 0


if __name__ == '__main__':
    sys.exit(main())
