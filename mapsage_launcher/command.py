"""The command ``mapsage``: a word for each program, and the launcher.

A program is one module of `mapsage/commands/` or of an extra, with the functions ``main()``, which
parses the command line and does the work, and ``run()``, which calls it and exits. A file of
`tools/` with the name of the module starts the same module. The module is imported only after the
checks here: if PyTorch or an MM package is missing, the error is the line that installs it. A
program's ``--help`` needs neither (`program_start.py`). To add a program, add a row to
``COMMANDS``, or to the ``extra.json`` of an extra (`extras.py`).
"""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple, NoReturn, Optional

from mapsage_launcher import hosts, shipped
from mapsage_launcher.extras import list_extras, missing_extra
from mapsage_launcher.program_start import asks_for_help, import_program
from mapsage_launcher.version import __version__


class Command(NamedTuple):
    """A word of the command line.

    Attributes:
        module: The program's module; its last part is the name of the file in `tools/`.
        about: What it does, for the list of commands; without it, the list has the name only.
        without_hosts: Whether it runs without PyTorch and the MM packages.
    """

    module: str
    about: str = ''
    without_hosts: bool = False

    @property
    def program(self) -> str:
        """Name of the program's file in `tools/`, without ``.py``."""
        return self.module.rpartition('.')[2]


COMMANDS: Dict[str, Command] = {
    'train': Command('mapsage.commands.train', 'train a config on one device'),
    'test': Command('mapsage.commands.test', 'evaluate a checkpoint'),
    'predict': Command('mapsage.commands.predict', 'make maps of images and scenes'),
    'doctor': Command(
        'mapsage.commands.doctor', 'say whether a training would start here, and why'
    ),
    'report': Command(
        'mapsage.commands.report', 'write the report of a run as one HTML file', without_hosts=True
    ),
    'compare': Command(
        'mapsage.commands.compare',
        'compare runs: scores, classes, settings, curves',
        without_hosts=True,
    ),
    'configs': Command(
        'mapsage.commands.list_configs',
        'list the configs that come with MapSage, or copy them',
        without_hosts=True,
    ),
    'passport': Command('mapsage.commands.passport', 'print which pixels a model was trained on'),
    'browse_dataset': Command('mapsage.commands.browse_dataset'),
    'check_weights': Command('mapsage.commands.check_weights'),
    'count_cards': Command('mapsage.commands.count_cards'),
    'export_lora': Command('mapsage.commands.export_lora'),
    'geotiff_statistics': Command('mapsage.commands.geotiff_statistics', without_hosts=True),
    'measure_shift': Command('mapsage.commands.measure_shift', without_hosts=True),
    'plot_sampling': Command('mapsage.commands.plot_sampling'),
    **{
        word: Command(**row)
        for extra in list_extras().values()
        for word, row in extra.commands.items()
    },
}

# Script that `mapsage launch` starts on all cards, by the next word of the command line.
LAUNCHED = {
    'train': 'start_8card_training.sh',
    'test': 'test.sh',
    'predict': 'predict.sh',
    'doctor': 'doctor.sh',
    'embed': 'embed.sh',
    'cache_features': 'cache_features.sh',
}
_LAUNCH = 'train on all cards of this machine (or of several), evaluate, draw pictures'
DEMO = 'configs/demo/efficientnet_lite0_fpn_demo.py'

_EXAMPLES = """examples:
  mapsage launch                                 make the demo's data, train on 8 ranks, make a map
  NPROC_PER_NODE=2 mapsage launch my_config.py   train your own config on 2 ranks
  mapsage configs --copy configs                 the shipped configs, to change them
  mapsage export CONFIG CHECKPOINT --out model.onnx
  mapsage view work_dirs/efficientnet_lite0_fpn_demo/map
"""


def main() -> None:
    """Run the command that the first argument names."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ('-h', '--help', 'help'):
        _print(usage())
        sys.exit(0 if arguments else 2)
    if arguments[0] in ('-V', '--version'):
        _print(f'mapsage {__version__}')
        return
    if arguments[0] == 'launch':
        launch(arguments[1:])
    run_program(arguments[0], arguments[1:])


def usage() -> str:
    """Return the text of ``mapsage --help``."""
    commands = {'launch': _LAUNCH, **{word: row.about for word, row in COMMANDS.items()}}
    return '\n'.join(
        [
            'usage: mapsage COMMAND [options]',
            '',
            'Train remote-sensing segmentation models with MMSegmentation, and make maps with them.',
            '',
            *(f'  {name:9} {about}' for name, about in commands.items() if about),
            '',
            _EXAMPLES,
            '`mapsage COMMAND --help` has the options of a command. The other programs run by their '
            'names:',
            *(f'  {name}' for name in sorted(commands) if not commands[name]),
        ]
    )


def find_command(name: str) -> Optional[Command]:
    """Return a program by its word or by its file in `tools/`, with hyphens or underscores."""
    programs = {row.program: row for row in COMMANDS.values()}
    return COMMANDS.get(name) or programs.get(name.replace('-', '_'))


def run_program(name: str, arguments: List[str]) -> None:
    """Run a program in this process.

    Args:
        name: Name for :func:`find_command`.
        arguments: Command line of the program.
    """
    command = find_command(name)
    if command is None:
        missing = missing_extra('programs', name)
        if missing is not None:
            _stop(f'mapsage {missing}', 2)
        known = ['launch', *(word for word, row in COMMANDS.items() if row.about)]
        near = difflib.get_close_matches(name, ['launch', *COMMANDS], 1)
        _stop(
            f'mapsage {name}: there is no such command.'
            + (f' Did you mean mapsage {near[0]}?' if near else '')
            + f' Commands: {", ".join(known)}; see mapsage --help.',
            2,
        )
    without_hosts = command.without_hosts or _is_exported(command, arguments)
    if not without_hosts and not asks_for_help(arguments):
        _need_hosts(f'mapsage {name}')
    # The program's usage begins with the first of these.
    sys.argv = [f'mapsage {name}', *arguments]
    import_program(command.module)()


def launch(arguments: List[str]) -> NoReturn:
    """Become the script that starts ranks on all cards; this Python runs the ranks.

    Args:
        arguments: A key of :data:`LAUNCHED` (default: a training), then the command line of the
            program. A training without a config trains the demo.
    """
    program, scripts = 'train', _shipped_folder('scripts')
    if arguments and arguments[0] in LAUNCHED:
        program, arguments = arguments[0], arguments[1:]
    script = scripts / LAUNCHED[program]
    if arguments and arguments[0] in ('-h', '--help'):
        _print(_read_header(script))
        sys.exit()
    _need_hosts('mapsage launch')
    if program == 'train' and (not arguments or arguments[0].startswith('-')):
        arguments = [DEMO, *arguments]
    os.environ.setdefault('MAPSAGE_PYTHON', sys.executable)
    try:
        os.execvp('bash', ['bash', str(script), *arguments])
    except FileNotFoundError:
        _stop(
            'mapsage launch needs bash, which is not on the PATH. Install it, or train on one '
            'device with mapsage train.'
        )


def _read_header(script: Path) -> str:
    """Return the comment at the top of a script; it names commands in place of files."""
    lines = script.read_text(encoding='utf-8').split('\n')[1:]
    lines = lines[: next(i for i, line in enumerate(lines) if not line.startswith('#'))]
    return shipped.name_installed_commands('\n'.join(line[2:] for line in lines))


def _is_exported(command: Command, arguments: List[str]) -> bool:
    """Return whether a map is made with an exported model, which needs no PyTorch."""
    return command.program == 'predict' and any(
        argument.split('=')[0] == '--model' for argument in arguments
    )


def _need_hosts(command: str) -> None:
    """Exit with the line to type if PyTorch or an MM package is missing."""
    absent = hosts.absent_hosts()
    if absent:
        _stop(
            f'{command} needs {", ".join(absent)}, not installed in {sys.executable}.\n'
            + hosts.how_to_install(absent)
        )


def _shipped_folder(name: str) -> Path:
    folder = shipped.SHIPPED / name
    if not folder.is_dir():
        _stop(f'{folder} is missing, which the wheel of mapsage has. Install mapsage again.')
    return folder


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The reader, such as `head`, has enough. Python would report this again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _stop(message: str, status: int = 1) -> NoReturn:
    print(f'error: {message}', file=sys.stderr)
    sys.exit(status)
