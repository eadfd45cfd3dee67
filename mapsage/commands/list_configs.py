"""List the configs that come with MapSage, or copy them into a folder to change them.

    python tools/list_configs.py                     all of them
    python tools/list_configs.py dinov3              configs with this word in their name
    python tools/list_configs.py NAME --show         all settings of one, with those that it inherits
    python tools/list_configs.py NAME --copy mine    a copy of one, which inherits from the shipped base files
    python tools/list_configs.py --copy configs      a copy of all of them, with their base files

Other programs accept the listed name of a config, and the path of a copy.
"""

from __future__ import annotations

import argparse
import sys
from typing import Optional, Sequence

from mapsage.base.console import accept_any_text, examples
from mapsage_launcher.shipped import (
    ShippedError,
    copy_config,
    copy_configs,
    find_config,
    list_configs,
)


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run the program with a command line (default: ``sys.argv``)."""
    accept_any_text()
    parser = argparse.ArgumentParser(
        description='List the configs that come with MapSage, or copy them.', **examples(__doc__)
    )
    parser.add_argument('word', nargs='?', default='', help='part of the names to list')
    parser.add_argument(
        '--show', action='store_true', help='print all settings of the config with this name'
    )
    parser.add_argument(
        '--copy',
        metavar='DIR',
        help='copy the config with this name, or without a name all of them, into this folder; files '
        'there are never overwritten',
    )
    args = parser.parse_args(argv)
    if args.show:
        show_config(parser, args.word)
        return
    if args.copy is not None:
        try:
            if args.word:
                print(f'{copy_config(args.word, args.copy)}: written')
                return
            copies = copy_configs(args.copy)
        except (OSError, ShippedError) as error:
            sys.exit(f'error: {error}')
        print(
            f'{args.copy}: {len(copies)} files written'
            if copies
            else f'{args.copy}: already complete'
        )
        return
    descriptions = {
        name: description for name, description in list_configs().items() if args.word in name
    }
    if not descriptions:
        sys.exit(f'error: no config has {args.word!r} in its name; without a word all are listed')
    for name, description in descriptions.items():
        print(f'{name}\n    {description}')


def show_config(parser: argparse.ArgumentParser, name: str) -> None:
    """Print the settings of a config, with those of the files that it inherits from."""
    try:
        path = find_config(name)
    except ShippedError as error:
        parser.error(f'--show {name}: {error}' if name else '--show needs the name of a config')
    from mapsage.engine.config.file import read_config_file
    from mapsage.engine.env_cfg import ConfigError

    try:
        print(read_config_file(path).pretty_text)
    except ConfigError as error:
        sys.exit(f'error: {error}')


def run() -> None:
    """Run the command line and exit."""
    main()
