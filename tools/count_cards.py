"""Print the cards that ranks would use here as JSON, such as {"accelerator": "cuda", "cards": 4}.

    python tools/count_cards.py [CONFIG] [--accelerator NAME]

0 cards where it would run on the CPU. The launcher starts as many ranks as there are cards, and
eight where there is none (mapsage_launcher/ranks/rank_count.py).
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mapsage.accelerator import resolve_accelerator  # noqa: E402
from mapsage.commands import cli  # noqa: E402


def main(argv=None) -> None:
    parser = cli.build_parser('Count the cards that ranks would use.', needs_config=False,
                              doc=__doc__)
    args, _ = parser.parse_known_args(argv)  # the launcher passes the options of any program
    name = args.accelerator
    if name is None and args.config is not None:
        name = (cli.load_config(args).get('env_cfg') or {}).get('accelerator')
    accelerator = resolve_accelerator(name or 'auto')
    print(json.dumps({'accelerator': accelerator.name, 'cards': accelerator.card_count()}))


if __name__ == '__main__':
    cli.run(main)
