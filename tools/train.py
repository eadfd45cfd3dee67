"""Train a config: on one device, or as one rank of a launcher.

    python tools/train.py configs/demo/efficientnet_lite0_fpn_demo.py
    bash scripts/start_8card_training.sh CONFIG [options of this program]
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mapsage.commands import cli  # noqa: E402


def main(argv=None) -> None:
    parser = cli.build_parser('Train a segmentation model.')
    parser.add_argument('--resume', action='store_true',
                        help='continue from the newest checkpoint of the work dir that can be read')
    parser.add_argument('--amp', action='store_true', help='automatic mixed precision')
    parser.add_argument('--encoders', type=int, metavar='N',
                        help='number of ranks that only compute the features of the frozen '
                        "backbone (feature_source of type 'Streamed')")
    args = parser.parse_args(argv)
    cfg = cli.load_config(args)
    if args.encoders is not None:
        cli.stream_features(cfg, args.encoders)
    cfg.resume = args.resume or cfg.get('resume', False)
    if args.amp and cfg.optim_wrapper.get('type') != 'AmpOptimWrapper':
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')
    cli.build_runner(cfg).train()


if __name__ == '__main__':
    cli.run(main)
