"""Write a trained EoMT as a folder that Hugging Face's transformers reads.

    python tools/export_eomt.py CONFIG CHECKPOINT OUT [--size 512]

OUT gets model.safetensors, config.json and preprocessor_config.json, for
``EomtDinov3ForUniversalSegmentation.from_pretrained(OUT)`` and ``EomtImageProcessor``.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mapsage.commands import cli  # noqa: E402


def main(argv=None) -> int:
    parser = cli.build_parser('Write a trained EoMT as a folder that transformers reads.')
    parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument('out', metavar='OUT', help='folder that is made')
    parser.add_argument('--size', type=int, metavar='PIXELS',
                        help="side of the images, which transformers fixes (default: the config's "
                        'training size)')
    args = parser.parse_args(argv)
    from mapsage.commands.export_eomt import export_eomt
    return export_eomt(args)


if __name__ == '__main__':
    sys.exit(cli.run(main))
