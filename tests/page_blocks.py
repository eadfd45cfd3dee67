"""Blocks of code in the pages of docs/, and a workspace that executes them at reduced size.

A comment directly above a block says what to do with it:

    <!-- test: skip card: why -->       not run; the kind is one of KINDS
    <!-- test: file configs/a.py -->    written to that path before the first block of the page runs
    <!-- test: with CONFIG=a.py N=2 -->    run with words of the block replaced, else as variables
    <!-- test: program -->              (Python) run as a program, not read as a part of a config

Without a comment, a shell block is run in the workspace, and a Python block is read as a part of a
config: every `type` in it must be registered and take the arguments that stand there. The workspace
looks like a checkout; `page_program.py` stands for `python` and `mapsage` there and makes trainings
and demo data small. Words such as CONFIG and CHECKPOINT stand for the demo's.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional

import mmseg.visualization  # noqa: F401  (registers what pages name)
from support import ROOT
from warm_python import warm_python

from mapsage.extras.streaming.build import _BUILDERS

DOCS = ROOT / 'docs'
LANGUAGES = ('bash', 'python')
# Why a block is not run.
KINDS = {
    'card': 'an accelerator',
    'network': 'the network',
    'data': 'data or weights that are not in the repository',
    'machines': 'several machines, or a batch system',
    'person': 'what a person draws or labels',
    'fragment': 'names that the page does not define',
    'time': 'more time than a test has',
}
# Words of the pages that stand for a file, with the demo's.
WORK_DIR = 'work_dirs/efficientnet_lite0_fpn_demo'
FIRST_RUN = f'$(ls -d {WORK_DIR}/20*/ | head -n 1)'
WORDS = {
    'WORK_DIR/20261123_141116': FIRST_RUN,
    'CONFIG': f'{WORK_DIR}/efficientnet_lite0_fpn_demo.py',
    'CHECKPOINT': f'{WORK_DIR}/iter_200.pth',
    'WORK_DIR': WORK_DIR,
    'INPUT...': 'data/demo/scene.tif',
    'SCENE...': 'data/demo/scene.tif',
    'MODEL.onnx': 'exported.onnx',
    'DIR': 'made',
    '/local/copies': 'copies',
    'scene.tif': 'data/demo/scene.tif',
}
_BLOCK = re.compile(
    r'(?:^<!-- test: (?P<order>[^\n]*?) -->\n+)?^(?P<fence>```+)(?P<language>\w+)[^\n]*\n'
    r'(?P<code>.*?)^(?P=fence)\s*?$',
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        page: Path in docs/.
        line: Number of its first line of code.
        language: One of ``LANGUAGES``.
        code: Its lines.
        order: What the comment above says, '' without one.
    """

    page: str
    line: int
    language: str
    code: str
    order: str

    @property
    def skipped(self) -> str:
        """The kind of reason for which the block is not run, '' if it is."""
        match = re.fullmatch(r'skip (\w+): .+', self.order)
        return match[1] if match else ''

    @property
    def words(self) -> Dict[str, str]:
        """What stands for words of the block, or is set as variables."""
        if not self.order.startswith('with '):
            return {}
        return dict(pair.split('=', 1) for pair in self.order.split()[1:])

    @property
    def file(self) -> str:
        """The path to which the block is written, '' if it is run."""
        return self.order[len('file ') :] if self.order.startswith('file ') else ''


def pages() -> List[str]:
    """Return the pages whose blocks are run: tutorials and how-tos in English."""
    return sorted(
        path.relative_to(DOCS).as_posix()
        for folder in ('tutorials', 'how-to')
        for path in (DOCS / folder).glob('*.md')
        if '.zh-CN' not in path.name
    )


def blocks_of(page: str) -> List[Block]:
    """Return the shell and Python blocks of a page.

    Raises:
        ValueError: If a comment above a block is none of those above.
    """
    text = (DOCS / page).read_text(encoding='utf-8')
    blocks = []
    for match in _BLOCK.finditer(text):
        if match['language'] not in LANGUAGES:
            continue
        line = text.count('\n', 0, match.start('code')) + 1
        block = Block(page, line, match['language'], match['code'], match['order'] or '')
        if block.order and not (
            block.skipped in KINDS or block.file or block.words or block.order == 'program'
        ):
            raise ValueError(
                f'docs/{page}:{line}: <!-- test: {block.order} --> is no order; see '
                f'tests/page_blocks.py'
            )
        blocks.append(block)
    return blocks


def count_blocks(names: Iterable[str]) -> Counter:
    """Return how many blocks of the pages are run, and skipped by kind."""
    return Counter(block.skipped or 'run' for page in names for block in blocks_of(page))


class Workspace:
    """A folder like a checkout, in which blocks are run.

    Args:
        folder: Empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ('tools', 'scripts', 'mapsage', 'mapsage_launcher', 'tests'):
            (folder / name).symlink_to(ROOT / name)
        shutil.copytree(str(ROOT / 'configs'), str(folder / 'configs'))
        programs = folder / 'bin'
        programs.mkdir()
        for name in ('python', 'mapsage'):
            program = programs / name
            program.write_text(
                f'#!/bin/sh\nexec "{warm_python()}" "{ROOT}/tests/page_program.py" {name} "$@"\n'
            )
            program.chmod(0o755)
        self.environ = {
            **os.environ,
            'PATH': f'{programs}:{Path(sys.executable).parent}:{os.environ["PATH"]}',
            'MAPSAGE_PYTHON': str(programs / 'python'),
            'OMP_NUM_THREADS': '1',
            'NPROC_PER_NODE': '1',
            'PYTHONPATH': str(folder),
        }

    def train_demo(self) -> str:
        """Make what the how-tos begin with: CONFIG and CHECKPOINT, MODEL.onnx, scenes, labels.

        Returns:
            The error, '' without one.
        """
        return self.run_shell(
            'bash scripts/start_8card_training.sh\n'
            'python tools/export.py CONFIG CHECKPOINT --out exported.onnx\n'
            'mkdir scenes labels\n'
            'cp data/demo/scene.tif scenes/\n'
            'cp data/demo/scene_label.tif labels/scene.tif\n'
        )

    def run_page(self, page: str) -> List[str]:
        """Run the blocks of a page; return a text for each that failed."""
        blocks = blocks_of(page)
        # Results of another page, perhaps of another model, which programs do not replace.
        for name in ('maps', 'made', 'features'):
            shutil.rmtree(str(self.folder / name), ignore_errors=True)
        for block in blocks:
            if block.file:
                path = self.folder / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.code, encoding='utf-8')
        failed = []
        for block in blocks:
            if block.skipped:
                continue
            text = (
                self.run_shell(block.code, block.words)
                if block.language == 'bash'
                else self.read(block)
            )
            if text:
                failed.append(f'docs/{page}:{block.line}\n{block.code}\n{text}')
        return failed

    def run_shell(self, code: str, words: Optional[Dict[str, str]] = None) -> str:
        """Run a shell block; return the end of its output if its status is not 0.

        Args:
            code: Its lines.
            words: Values of words of the lines, or of variables whose names do not occur in them.
        """
        # Options that may be left out.
        code = re.sub(r' \[(?:--\w|[A-Z])[^\]]*\]', '', code)
        variables = {}
        for word, value in {**WORDS, **(words or {})}.items():
            pattern = rf'(?<![\w/.$]){re.escape(word)}(?![\w=])'
            if word not in WORDS and not re.search(pattern, code):
                variables[word] = value
            code = re.sub(pattern, value, code)
        done = subprocess.run(
            ['bash', '-euo', 'pipefail', '-c', code],
            cwd=str(self.folder),
            timeout=600,
            env={**self.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
            errors='replace',
        )
        return '' if done.returncode == 0 else f'status {done.returncode}\n{done.stdout[-5000:]}'

    def read(self, block: Block) -> str:
        """Run a Python block as a program, or read it as a part of a config; return the error."""
        if block.file:
            return ''
        try:
            if block.order == 'program':
                (self.folder / 'block.py').write_text(block.code, encoding='utf-8')
                return self.run_shell('python block.py')
            check_config(block.code)
        except Exception as error:  # noqa: B902  (of any kind: it is the result)
            return f'{type(error).__name__}: {error}'
        return ''


def check_config(code: str) -> None:
    """Run a part of a config, and look up each `type` in it.

    ``...`` stands for settings that the page leaves out, ``{{_base_.x}}`` for values of a base.

    Raises:
        KeyError: If a type is not registered.
        TypeError: If its class does not take an argument that stands there.
    """

    def make_dict(*_: Any, **settings: Any) -> Dict[str, Any]:
        return settings

    scope: Dict[str, Any] = {'dict': make_dict}
    exec(re.sub(r'\{\{.*?\}\}', 'None', code), scope)  # noqa: S102
    for name, value in scope.items():
        if not name.startswith('__') and name != 'dict':
            _check_types(value)


def _check_types(value: Any) -> None:
    if isinstance(value, (list, tuple)):
        for element in value:
            _check_types(element)
    elif isinstance(value, Mapping):
        if isinstance(value.get('type'), str):
            _check_arguments(value)
        for element in value.values():
            _check_types(element)


def _check_arguments(settings: Mapping[str, Any]) -> None:
    kinds = _registered().get(settings['type'], [])
    if not kinds:
        raise KeyError(f'type={settings["type"]!r} is not registered')
    names = {name for name in settings if name not in ('type', '_delete_', '_scope_')}
    problems = []
    for kind in kinds:
        accepted = _accepted(kind)
        if accepted is None or names <= accepted:
            return
        problems.append(f'{kind.__name__} takes no {", ".join(sorted(names - accepted))}')
    raise TypeError('; '.join(problems))


def _accepted(kind: Any) -> Any:
    """Return the names of the arguments of a class and its bases; None if it takes any."""
    names = set()
    for base in inspect.getmro(kind) if inspect.isclass(kind) else [kind]:
        target = base.__dict__.get('__init__') if inspect.isclass(base) else base
        if target is None:
            continue
        parameters = inspect.signature(target).parameters.values()
        names.update(parameter.name for parameter in parameters)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return names
    return None


def _registered() -> Dict[str, List[Any]]:
    """Return the classes of all registries by name, with the sources of features."""
    import mmengine.registry
    import mmseg.registry
    from mmengine.registry import Registry
    from mmseg.utils import register_all_modules

    import mapsage  # noqa: F401

    register_all_modules(init_default_scope=False)
    kinds: Dict[str, List[Any]] = {}
    for module in (mmengine.registry, mmseg.registry):
        for registry in vars(module).values():
            if isinstance(registry, Registry):
                for name, kind in registry.module_dict.items():
                    if kind not in kinds.setdefault(name, []):
                        kinds[name].append(kind)
    # `feature_source` has types of its own.
    for name, build in _BUILDERS.items():
        kinds.setdefault(name, []).append(build)
    return kinds
