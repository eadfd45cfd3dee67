"""The command ``mapsage``: a word for each program of tools/, and the launcher.

It does not import ``mapsage``, which takes seconds: ``mapsage --help`` answers at once,
``mapsage launch`` starts the imports of the ranks at once, and where PyTorch or the MM packages are
missing, the error is the line that installs them.

The programs lie in mapsage/.mim/tools, where the wheel has them and OpenMIM looks for them; in a
checkout, in tools/.
"""
from __future__ import annotations

import difflib
import os
import sys
import types
from pathlib import Path
from typing import Dict, List, NamedTuple, NoReturn

from mapsage_launcher import hosts, shipped
from mapsage_launcher.version import __version__


class Command(NamedTuple):
    """A word of the command line.

    Attributes:
        program: File in tools/.
        about: What it does, for the list of commands.
        without_hosts: Whether it runs without PyTorch and the MM packages.
    """

    program: str
    about: str
    without_hosts: bool = False


COMMANDS: Dict[str, Command] = {
    'train': Command('train.py', 'train a config on one device'),
    'test': Command('test.py', 'evaluate a checkpoint'),
    'predict': Command('predict.py', 'make maps of images and scenes'),
    'export': Command('export.py', 'write a model as one ONNX file'),
    'view': Command('view.py', 'show maps in a browser', without_hosts=True),
    'doctor': Command('doctor.py', 'say whether a training would start here, and why'),
    'prepare': Command('prepare_data.py', 'write LoveDA, Potsdam, Vaihingen or iSAID for training'),
    'suggest': Command('suggest_labels.py', 'choose the windows to label next'),
    'report': Command('report.py', 'write the report of a run as one HTML file',
                      without_hosts=True),
    'compare': Command('compare.py', 'compare runs: scores, classes, settings, curves',
                       without_hosts=True),
    'configs': Command('list_configs.py', 'list the configs that come with MapSage, or copy them',
                       without_hosts=True),
}
_OTHERS_WITHOUT_HOSTS = ('geotiff_statistics.py', )

# What `mapsage launch` starts on all cards, by the word behind it.
LAUNCHED = {'train': 'start_8card_training.sh', 'test': 'test.sh', 'predict': 'predict.sh',
            'doctor': 'doctor.sh', 'cache_features': 'cache_features.sh'}
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
    words = sys.argv[1:]
    if not words or words[0] in ('-h', '--help', 'help'):
        _print(usage())
        sys.exit(0 if words else 2)
    if words[0] in ('-V', '--version'):
        _print(f'mapsage {__version__}')
        return
    if words[0] == 'launch':
        launch(words[1:])
    run_program(words[0], words[1:])


def usage() -> str:
    """Return the text of ``mapsage --help``."""
    listed = {'launch': _LAUNCH, **{name: command.about for name, command in COMMANDS.items()}}
    known = {command.program for command in COMMANDS.values()} | {'launch.py'}
    others = sorted(path.stem for path in _shipped('tools').glob('*.py') if path.name not in known)
    return '\n'.join([
        'usage: mapsage COMMAND [options]', '',
        'Train remote-sensing segmentation models with MMSegmentation, and make maps with them.',
        '', *(f'  {name:9} {about}' for name, about in listed.items()), '', _EXAMPLES,
        '`mapsage COMMAND --help` has the options of a command. The other programs run by their '
        'names:\n' + '\n'.join(f'  {name}' for name in others)])


def run_program(name: str, arguments: List[str]) -> None:
    """Run a program of tools/ in this process, as ``__main__``."""
    tools = _shipped('tools')
    command = COMMANDS.get(name) or Command(f'{name.replace("-", "_")}.py', '')
    program = tools / command.program
    if not program.is_file() or program.parent != tools:
        known = ['launch', *COMMANDS]
        near = difflib.get_close_matches(name, known, 1)
        _stop(f'mapsage {name}: there is no such command.'
              + (f' Did you mean mapsage {near[0]}?' if near else '')
              + f' Commands: {", ".join(known)}; see mapsage --help.', 2)
    without_hosts = (command.without_hosts or command.program in _OTHERS_WITHOUT_HOSTS
                     or _is_exported(command, arguments))
    if not without_hosts:
        _need_hosts(f'mapsage {name}')
    # Not by runpy, which puts the path of the file before the arguments, and so into the usage.
    sys.argv = [f'mapsage {name}', *arguments]
    sys.modules['__main__'] = main = types.ModuleType('__main__')
    main.__file__ = str(program)
    exec(compile(program.read_bytes(), str(program), 'exec'), main.__dict__)


def launch(arguments: List[str]) -> NoReturn:
    """Become the script that starts ranks on all cards, with this Python for the ranks.

    The first argument may say what is launched, a key of :data:`LAUNCHED`; by default a training.
    Without a config, the demo is trained.
    """
    what, scripts = 'train', _shipped('scripts')
    if arguments and arguments[0] in LAUNCHED:
        what, arguments = arguments[0], arguments[1:]
    script = scripts / LAUNCHED[what]
    if arguments and arguments[0] in ('-h', '--help'):
        _print(_header(script))
        sys.exit()
    _need_hosts('mapsage launch')
    if what == 'train' and (not arguments or arguments[0].startswith('-')):
        arguments = [DEMO, *arguments]
    os.environ.setdefault('MAPSAGE_PYTHON', sys.executable)
    try:
        os.execvp('bash', ['bash', str(script), *arguments])
    except FileNotFoundError:
        _stop('mapsage launch needs bash, which is not on the PATH. Install it, or train on one '
              'device with mapsage train.')


def _header(script: Path) -> str:
    """Return the comment at the top of a script, with the words of this command."""
    lines = script.read_text(encoding='utf-8').split('\n')[1:]
    lines = lines[:next(i for i, line in enumerate(lines) if not line.startswith('#'))]
    return shipped.in_words_of_here('\n'.join(line[2:] for line in lines))


def _is_exported(command: Command, arguments: List[str]) -> bool:
    """Return whether a map is made with an exported model, which needs no PyTorch."""
    return command.program == 'predict.py' and any(
        word.split('=')[0] == '--model' for word in arguments)


def _need_hosts(command: str) -> None:
    """Exit with the line to type if PyTorch or an MM package is missing."""
    absent = hosts.absent_hosts()
    if absent:
        _stop(f'{command} needs {", ".join(absent)}, not installed in {sys.executable}.\n'
              + hosts.how_to_install(absent))


def _shipped(folder: str) -> Path:
    found = shipped.SHIPPED / folder
    if not found.is_dir():
        _stop(f'{found} is missing, which the wheel of mapsage has. Install mapsage again.')
    return found


def _print(text: str) -> None:
    try:
        print(text, flush=True)  # noqa: T201
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _stop(message: str, status: int = 1) -> NoReturn:
    print(f'error: {message}', file=sys.stderr)  # noqa: T201
    sys.exit(status)
