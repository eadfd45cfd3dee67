"""Print the cards that ranks would use here as JSON, such as {"accelerator": "cuda", "cards": 4}.

    python tools/count_cards.py [CONFIG] [--accelerator NAME]

Prints 0 cards if a run would use the CPU. The launcher starts one rank for each card, and eight
ranks without a card (mapsage_launcher/ranks/rank_count.py).
"""

from __future__ import annotations

import json
from typing import Optional, Sequence

from mapsage.commands import options


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run the program with a command line (default: ``sys.argv``)."""
    parser = options.build_parser(
        'Count the cards that ranks would use.', needs_config=False, doc=__doc__
    )
    # The launcher passes the options of any program.
    args, _ = parser.parse_known_args(argv)
    from mapsage.accelerator import resolve_accelerator
    from mapsage.commands import cli

    name = args.accelerator
    if name is None and args.config is not None:
        name = (cli.load_config(args).get('env_cfg') or {}).get('accelerator')
    accelerator = resolve_accelerator(name or 'auto')
    print(json.dumps({'accelerator': accelerator.name, 'cards': accelerator.card_count()}))


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
