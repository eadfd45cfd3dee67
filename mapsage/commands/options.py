"""Options that trainings, tests and other programs share, named as in MMSegmentation.

`mapsage COMMAND --help` imports this module and not PyTorch, so neither may this module. What the
options mean for a config is in `cli.py`.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, List, Optional, Sequence, Union

from mapsage.base.console import examples

_RESUME_MODES = ('auto', 'must')


class ConfigOptions(argparse.Action):
    """MMEngine's ``DictAction``, which is imported when the option is used."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: Optional[str] = None,
    ) -> None:
        """Store ``KEY=VALUE`` of the command line as a dictionary."""
        from mmengine.config import DictAction

        action = DictAction(self.option_strings, self.dest, nargs=self.nargs)
        for value in values:
            key, _, setting = value.partition('=')
            if not key or '=' not in value:
                parser.error(
                    f'{option_string} {value}: expected KEY=VALUE without a space around =, such '
                    f'as train_cfg.max_iters=100'
                )
            # MMEngine takes a dict for text, or recurses into it without an end.
            is_read = not re.match(r'[\[( ]*(dict\(|\{\s*[\'"])', setting)
            if is_read:
                try:
                    action(parser, namespace, [value], option_string)
                except (AssertionError, RecursionError):
                    is_read = False
            if not is_read:
                parser.error(
                    f'{option_string} {value}: expected a number, a text, or a list of them such as '
                    f'[1,2]. Set a dict key by key (optimizer.lr=0.1), or write it into a config '
                    f'that inherits from this one'
                )


def build_parser(
    description: str, needs_config: bool = True, doc: Optional[str] = None
) -> argparse.ArgumentParser:
    """Return a parser with the options that trainings and tests share, named as in MMSegmentation.

    Args:
        description: What the program does.
        needs_config: Whether the config is a required argument.
        doc: Docstring with examples for the help.
    """
    parser = argparse.ArgumentParser(description=description, **examples(doc))
    parser.add_argument(
        'config',
        nargs=None if needs_config else '?',
        help='path of the config file, or the name of one that comes with MapSage',
    )
    parser.add_argument(
        '--work-dir',
        help='where logs, checkpoints and pictures go (default: '
        "the config's work_dir, else work_dirs/<config name>)",
    )
    parser.add_argument(
        '--accelerator',
        help='auto, cuda, gcu, gcu_t20, xla, cpu, sim, or the '
        'device of a plugin of PyTorch such as npu (default: env_cfg.accelerator '
        'of the config, else auto)',
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=ConfigOptions,
        metavar='KEY=VALUE',
        help='override settings of the config: model.backbone.depth=18 '
        'key="[a,b]" key="[(a,b),(c,d)]"; quote, and no white space inside',
    )
    parser.add_argument(
        '--verbose',
        action='store_true',
        help="show on the terminal what the log file has (log_level='DEBUG')",
    )
    parser.add_argument(
        '--launcher',
        choices=['none', 'pytorch', 'slurm', 'mpi'],
        default='none',
        help='what started this process (default: none)',
    )
    parser.add_argument(
        '--local_rank',
        '--local-rank',
        type=int,
        help='for torch.distributed.launch; torchrun sets LOCAL_RANK instead',
    )
    return parser


def pixel_size(text: str) -> Union[float, str]:
    """Return the value of ``--gsd``: meters, or ``'auto'``."""
    return text if text == 'auto' else float(text)


def add_scene_options(parser: argparse.ArgumentParser) -> None:
    """Add the options on how scenes are compared with the passport of a model, and read."""
    parser.add_argument(
        '--units',
        choices=('stored', 'reflectance', 'harmonized'),
        help='unit in which scenes are read (default: as in the training): stored, as the files are; '
        'reflectance, scale and offset applied; harmonized, without the 1,000 of newer Sentinel-2 '
        'baselines',
    )
    parser.add_argument(
        '--trust-scenes',
        action='store_true',
        help='no warnings about scenes that are unlike those of the training; other pixel sizes pass',
    )


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add ``--resume [must]``, with the value None, ``'auto'`` or ``'must'``."""
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        choices=_RESUME_MODES,
        help='continue from the newest checkpoint of the work dir that can be '
        'read; while there is none, start the run. `--resume must`: an error while '
        'there is none',
    )


def with_resume_mode(arguments: Optional[Sequence[str]]) -> List[str]:
    """Return the arguments with the mode ``auto`` after a ``--resume`` without a mode.

    Otherwise argparse would take the next argument, such as the config, as the mode.

    Args:
        arguments: Arguments of a program; None for the arguments of this process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    completed: List[str] = []
    for argument, following in zip(arguments, [*arguments[1:], '']):
        completed.append(argument)
        if argument == '--resume' and following not in _RESUME_MODES:
            completed.append('auto')
    return completed
