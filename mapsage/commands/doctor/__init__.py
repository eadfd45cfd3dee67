"""Tell whether a training would start here, and the reasons. Exit status 0 if it would.

python tools/doctor.py [CONFIG] [--accelerator NAME]    one process
bash scripts/doctor.sh [CONFIG]                         all cards, and how they communicate

`diagnosis.py` is the whole report. Every other module checks one subject and returns `Finding`s
(`finding.py`): installed packages, environment variables, the config, samples of the data, the
built run, and the ranks of a launcher.
"""

from __future__ import annotations

from typing import Optional, Sequence

from mapsage.commands import options
from mapsage_launcher.extras import extensions_of


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = options.build_parser('Say whether a training would start here.', False, __doc__)
    extensions = extensions_of('doctor')
    for extension in extensions:
        extension.add_options(parser)
    args = parser.parse_args(argv)
    for extension in extensions:
        extension.check_options(parser, args)
        if extension.is_asked(args):
            return extension.run(args)
    from mapsage.commands.doctor.diagnosis import diagnose

    return diagnose(args)


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
