"""Processor time of help texts, and of importing MapSage above MMSegmentation.

    python tools/benchmarks/start_up.py [--repeats 5]

Every command and every import runs in a separate process, in turns; the figures are the median
and the range of user and system time, so other work on the machine counts little.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]
HELP = (
    'import sys; from mapsage_launcher.command import main; '
    'sys.argv = ["mapsage", *{words!r}]; main()'
)
# What a run of MMSegmentation imports: its own train.py, with the modules that register parts.
HOST = (
    'import torch, mmengine.runner, mmseg.datasets, mmseg.engine, mmseg.evaluation, '
    'mmseg.models, mmseg.structures, mmseg.visualization'
)
# MapSage freezes the objects of the host packages, so that Python ends 0.8 s earlier with it. The
# imports are compared without that.
END = 'import os; os._exit(0)'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--repeats', type=int, default=5)
    repeats = parser.parse_args().repeats
    from _common import describe_machine

    from mapsage_launcher.command import COMMANDS

    programs = {'python': 'pass', 'mapsage --help': HELP.format(words=['--help'])}
    programs.update(
        {
            f'mapsage {name} --help': HELP.format(words=[name, '--help'])
            for name in (*COMMANDS, 'launch')
        }
    )
    programs.update(
        {
            'MMSegmentation': f'{HOST}; {END}',
            'MMSegmentation, then MapSage': f'{HOST}; import mapsage; {END}',
        }
    )
    seconds = {name: [] for name in programs}
    # Python compiles a module once, at its first import.
    with tempfile.TemporaryDirectory() as bytecode:
        for program in programs.values():
            run(program, bytecode)
        for _ in range(repeats):
            for name, program in programs.items():
                seconds[name].append(run(program, bytecode))
    print(describe_machine())
    print('| processor time, s | median | lowest | highest |\n|---|---|---|---|')
    for name, values in seconds.items():
        print(
            f'| {name} | {statistics.median(values):.3f} | {min(values):.3f} | {max(values):.3f} |'
        )
    above = [
        ours - host
        for ours, host in zip(seconds['MMSegmentation, then MapSage'], seconds['MMSegmentation'])
    ]
    print(
        f'import mapsage above MMSegmentation: {statistics.median(above):.3f} '
        f'({min(above):.3f} to {max(above):.3f})'
    )


def run(program: str, bytecode: str) -> float:
    """Return the processor seconds of a process that runs a line of Python.

    Args:
        program: The line.
        bytecode: Folder of compiled modules.
    """
    environ = dict(os.environ, OMP_NUM_THREADS='1', PYTHONPYCACHEPREFIX=bytecode)
    environ.pop('PYTHONDONTWRITEBYTECODE', None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', program],
        check=True,
        cwd=str(ROOT),
        stdout=subprocess.DEVNULL,
        env=environ,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == '__main__':
    main()
