"""Notebooks of docs/tutorials: execute them, and show them as pages.

    python scripts/docs_site/notebooks.py              execute all, and keep what they show
    python scripts/docs_site/notebooks.py --out DIR    execute copies in a folder, as the tests do

Needs the environment `docs`. Each notebook runs in an empty folder with the command ``mapsage``, as
where MapSage is installed without a checkout. Pictures are kept at a width of 640 pixels.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / 'docs' / 'tutorials' / 'notebooks'
WIDTH = 640  # pixels
SECONDS = 600  # a cell may take that long next to other work


def execute(notebook: Path, target: Path) -> float:
    """Execute a notebook and write it with its outputs; return the seconds that it took.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell fails.
    """
    import nbclient
    import nbformat

    content = nbformat.read(notebook, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / 'bin' / 'mapsage'
        program.parent.mkdir()
        program.write_text(
            f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -c '
            f'"from mapsage_launcher.command import main; main()" "$@"\n'
        )
        program.chmod(0o755)
        work = Path(folder) / 'work'
        work.mkdir()
        environ = dict(os.environ)
        os.environ.update(
            PATH=f'{program.parent}:{environ["PATH"]}',
            OMP_NUM_THREADS='1',
            PYTHONPATH=str(ROOT),
            PYTHONWARNINGS='ignore',
        )
        start = time.monotonic()
        try:
            nbclient.NotebookClient(
                content,
                timeout=SECONDS,
                kernel_name='python3',
                resources=dict(metadata=dict(path=str(work))),
            ).execute()
        finally:
            os.environ.clear()
            os.environ.update(environ)
        seconds = time.monotonic() - start
    for cell in content.cells:
        cell.metadata = {}
        for output in cell.get('outputs', []):
            _shrink(output)
    content.metadata = dict(kernelspec=dict(name='python3', display_name='Python 3'))
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(content, target)
    return seconds


def _shrink(output: Any) -> None:
    """Make the picture of an output small, and leave pages out, in place."""
    from PIL import Image

    data = output.get('data', {})
    # The report of a run is a page with pictures, which a live notebook shows.
    data.pop('text/html', None)
    if 'image/png' not in data:
        return
    image = Image.open(io.BytesIO(base64.b64decode(data['image/png']))).convert('RGB')
    if image.width > WIDTH:
        image = image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.LANCZOS)
    buffer = io.BytesIO()
    # A smaller palette would merge the colors of a legend, which few pixels have, with others.
    flat = image.getcolors(256)
    image = image if flat is None else image.quantize(len(flat))
    image.save(buffer, 'png', optimize=True)
    data['image/png'] = base64.b64encode(buffer.getvalue()).decode()


def to_markdown(notebook: Path) -> str:
    """Return a notebook as a page in Markdown; pictures are part of it."""
    import json

    content = json.loads(notebook.read_text(encoding='utf-8'))
    blocks = []
    for cell in content['cells']:
        source = ''.join(cell['source'])
        if cell['cell_type'] == 'markdown':
            blocks.append(source)
            continue
        blocks.append(f'```python\n{source}\n```')
        for output in cell['outputs']:
            data = output.get('data', {})
            if 'image/png' in data:
                picture = ''.join(data['image/png']).strip()
                blocks.append(f'<img alt="output" src="data:image/png;base64,{picture}">')
            else:
                text = ''.join(output.get('text', data.get('text/plain', '')))
                blocks.append(f'```text\n{text.rstrip()}\n```')
    blocks.insert(1, f'*This page is a notebook: `docs/tutorials/notebooks/{notebook.name}`.*')
    return '\n\n'.join(blocks) + '\n'


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('notebooks', nargs='*', type=Path, help='default: all')
    parser.add_argument(
        '--out',
        type=Path,
        help='folder of the executed notebooks (default: the notebooks themselves)',
    )
    args = parser.parse_args()
    for notebook in args.notebooks or sorted(NOTEBOOKS.glob('*.ipynb')):
        target = (args.out / notebook.name) if args.out else notebook
        seconds = execute(notebook, target)
        print(f'{target}: {seconds:.0f} s, {target.stat().st_size / 1000:.0f} kB')
    return 0


if __name__ == '__main__':
    sys.exit(main())
