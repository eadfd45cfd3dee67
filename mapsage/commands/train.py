"""Train a config: on one device, or as one rank of a launcher.

python tools/train.py configs/demo/efficientnet_lite0_fpn_demo.py
bash scripts/start_8card_training.sh CONFIG [options of this program]
"""

from __future__ import annotations

import argparse
from typing import Any, Iterable, Optional, Sequence

from mapsage.commands import options
from mapsage_launcher.extras import extensions_of
from mapsage_launcher.stop_request import listening


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the options, without those of extras."""
    parser = options.build_parser('Train a segmentation model.', doc=__doc__)
    options.add_resume(parser)
    parser.add_argument('--amp', action='store_true', help='automatic mixed precision')
    return parser


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run the program with a command line (default: ``sys.argv``)."""
    parser = build_parser()
    extensions = extensions_of('train')
    for extension in extensions:
        extension.add_options(parser)
    args = parser.parse_args(options.with_resume_mode(argv))
    for extension in extensions:
        extension.check_options(parser, args)
    train(args, extensions)


def train(args: argparse.Namespace, extensions: Iterable[Any] = ()) -> None:
    """Train with the options of a command line; an extension that is asked takes its place."""
    from mmengine.runner import Runner

    from mapsage.commands import cli
    from mapsage.engine.config import check_config
    from mapsage.engine.guards import ValidationTrialHook

    cfg = cli.load_config(args)
    cfg.resume = args.resume or cfg.get('resume', False)
    if args.amp and cfg.optim_wrapper.get('type') != 'AmpOptimWrapper':
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')
    check_config(cfg, values=True)
    for extension in extensions:
        if extension.is_asked(args) and extension.run(args, cfg):
            return
    # A signal to stop waits until the model is built, unless the config has no StopHook.
    with listening((cfg.get('default_hooks') or {}).get('stop', {}) is not None):
        runner = cli.build_runner(cfg)
        # An encoder's rank trains nothing.
        if isinstance(runner, Runner):
            runner.register_hook(ValidationTrialHook())
        runner.train()


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
