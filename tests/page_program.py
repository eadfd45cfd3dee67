"""Stands for `python` and `mapsage` in the workspace of `page_blocks.py`, and makes work small.

    page_program.py python tools/train.py CONFIG ...
    page_program.py mapsage train CONFIG ...

A training makes two steps, the demo's data are one scene, made pairs of two dates come from two, a
scene has few pixels, a cache of features holds some tiles, options of a step are compared for a
shorter time, and the server of the viewer ends after its address was printed. Other programs run as
they stand.
"""

import os
import re
import runpy
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS = '2'
TRAINING = [
    f'train_cfg.max_iters={STEPS}',
    f'train_cfg.val_interval={STEPS}',
    f'default_hooks.checkpoint.interval={STEPS}',
    'train_dataloader.num_workers=0',
    'train_dataloader.persistent_workers=False',
    'val_dataloader.num_workers=0',
    'val_dataloader.persistent_workers=False',
]
DEMO = ['--val-scenes', '1']
SCENES = ['--scene-size', '400']
PAIRS = [*DEMO, '--train-scenes', '2']
CACHED = ['train_dataloader.dataset.indices=16', 'val_dataloader.dataset.indices=4']
TUNING = 40.0  # seconds


def shorten(program: str, options: list) -> list:
    """Return the options of a program with those that make its work small."""
    settings = {'train': TRAINING, 'cache_features': CACHED}.get(program)
    if settings and '--help' not in options:
        if '--cfg-options' in options:
            index = options.index('--cfg-options') + 1
            return [*options[:index], *settings, *options[index:]]
        return [*options, '--cfg-options', *settings]
    if program == 'make_demo_data' and '--stacks' not in options:
        return [
            *options,
            *(SCENES if '--geotiff' in options else PAIRS if '--change' in options else DEMO),
        ]
    return options


def shorten_tuning() -> None:
    """Give `mapsage tune` less time."""
    from mapsage.extras.forensics.tuning import command

    command.BUDGET = command.LEAST_BUDGET = TUNING


def name_checkpoints(words: list) -> None:
    """Give checkpoints of short trainings the names that a command line has."""
    for word in words:
        path = Path(word)
        pointer = path.with_name('last_checkpoint')
        if re.fullmatch(r'iter_\d+\.pth', path.name) and not path.exists() and pointer.exists():
            path.symlink_to(Path(pointer.read_text().strip()).name)


def find_program(words: list) -> str:
    """Return the name of the program of a command line without options, '' if it is another."""
    if words and Path(words[0]).parent.name == 'tools':
        return Path(words[0]).stem
    return ''


def main() -> None:
    """Run the command line."""
    name, words = sys.argv[1], sys.argv[2:]
    name_checkpoints(words)
    program = words[0] if name == 'mapsage' and words else find_program(words)
    if program == 'launch' and name == 'python':  # tools/launch.py [options] tools/train.py CONFIG
        start = next(
            (
                i
                for i, word in enumerate(words)
                if word.endswith(('/train.py', '/cache_features.py'))
            ),
            None,
        )
        if start is not None:
            words = [*words[: start + 1], *shorten(Path(words[start]).stem, words[start + 1 :])]
    elif program:
        words = [words[0], *shorten(program, words[1:])]
    if program == 'tune':
        shorten_tuning()
    if program == 'view' and '--static' not in words:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        signal.alarm(5)
    sys.path[0] = str(ROOT)
    if name == 'mapsage':
        from mapsage_launcher.command import main as run_command

        sys.argv = ['mapsage', *words]
        run_command()
    elif words[:1] == ['-m']:
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name='__main__', alter_sys=True)
    elif words[:1] == ['-c']:
        sys.argv = words[1:]
        exec(words[1], {'__name__': '__main__'})
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name='__main__')


if __name__ == '__main__':
    main()
