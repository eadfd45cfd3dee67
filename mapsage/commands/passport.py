"""Print the passport of a checkpoint or an exported model: which pixels it was trained on, as JSON.

    mapsage passport CHECKPOINT.pth
    mapsage passport MODEL.onnx

The exit status is 1 if the file has none.
"""

from __future__ import annotations

import argparse
import functools
import json
from typing import Callable, Optional, Sequence

from mapsage.base.console import examples


def main(
    argv: Optional[Sequence[str]] = None,
    say: Callable[[str], None] = functools.partial(print, flush=True),
) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or '').splitlines()[0], **examples(__doc__)
    )
    parser.add_argument(
        'file', help='checkpoint of a run (.pth), or file of mapsage export (.onnx)'
    )
    path = parser.parse_args(argv).file
    from mapsage.geo.passport import passport_of_checkpoint, read_passport

    if path.lower().endswith('.onnx'):
        from mapsage.maps.exported import ExportedModel

        passport, problem = read_passport(ExportedModel(path).description.passport, path)
    else:
        from mmengine.logging import MMLogger

        from mapsage.maps.model import read_checkpoint

        # Its line on the loaded file would stand before the JSON.
        MMLogger.get_current_instance().setLevel('WARNING')
        passport, problem = passport_of_checkpoint(read_checkpoint(path).get('meta'), path)
    say(problem or json.dumps(passport, indent=1, ensure_ascii=False))
    return 1 if problem else 0


def run() -> None:
    """Run the command line and exit with its status, or 1 after an error."""
    from mapsage.commands import cli

    cli.run(main)
