"""Pages of the reference that are read from the code: registered names, commands, log words.

`hooks.py` puts them into the site; tests/unit/test_reference_pages.py compares them with the code.
They are text in Markdown. mkdocstrings replaces ``::: path.of.a.Class`` by the signature and the
docstring of that class.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple
from unittest import mock

# Page -> title, and the registries whose names it has.
REGISTRY_PAGES: Dict[str, Tuple[str, Tuple[str, ...]]] = {
    'hooks': ('Hooks', ('HOOKS',)),
    'models': ('Models and losses', ('MODELS',)),
    'datasets': ('Datasets and samplers', ('DATASETS', 'DATA_SAMPLERS')),
    'transforms': ('Transforms', ('TRANSFORMS',)),
    'metrics': ('Metrics', ('METRICS',)),
    'task-utils': ('Scores and rewards', ('TASK_UTILS',)),
    'run': (
        'Runner, wrappers, optimizers',
        (
            'RUNNERS',
            'MODEL_WRAPPERS',
            'OPTIM_WRAPPERS',
            'OPTIM_WRAPPER_CONSTRUCTORS',
            'PARAM_SCHEDULERS',
        ),
    ),
}


class Registered(NamedTuple):
    """A class or function of MapSage in a registry of MMEngine.

    Attributes:
        registry: Name of the registry, such as ``'HOOKS'``.
        name: Name in the registry, the ``type`` of a config.
        path: Dotted path of the class or function.
        about: First sentence of its docstring.
    """

    registry: str
    name: str
    path: str
    about: str


def read_registries() -> List[Registered]:
    """Return what ``import mapsage`` registers, sorted by registry and name."""
    import mmengine.registry
    import mmseg.registry
    from mmengine.registry import Registry

    import mapsage  # noqa: F401

    entries = set()
    for module in (mmengine.registry, mmseg.registry):
        for registry, content in vars(module).items():
            if isinstance(content, Registry):
                entries.update(
                    Registered(
                        registry,
                        name,
                        f'{kind.__module__}.{kind.__qualname__}',
                        _first_sentence(kind),
                    )
                    for name, kind in content.module_dict.items()
                    if kind.__module__.split('.')[0] == 'mapsage'
                )
    return sorted(entries)


def _first_sentence(kind: Any) -> str:
    text = ' '.join((inspect.getdoc(kind) or '').split('\n\n')[0].split())
    text = re.split(r'(?<=[.])\s', text)[0]
    return re.sub(r':\w+:`~?([^`]+)`', r'`\1`', text).replace('``', '`')


def registered_pages() -> Dict[str, str]:
    """Return the pages of registered names: path in docs/ -> Markdown."""
    entries = read_registries()
    covered = {registry for _, names in REGISTRY_PAGES.values() for registry in names}
    missing = {entry.registry for entry in entries} - covered
    if missing:
        raise KeyError(f'registries {sorted(missing)} are on no page: add them to REGISTRY_PAGES')
    pages = {'reference/registered/index.md': _index_of(entries)}
    for page, (title, registries) in REGISTRY_PAGES.items():
        blocks = [
            f'# {title}',
            'The `type` of a config, with its arguments. Without a default an '
            'argument is required. '
            f'Registr{"y" if len(registries) == 1 else "ies"}: '
            f'{", ".join(f"`{registry}`" for registry in registries)}.',
        ]
        for entry in entries:
            if entry.registry in registries:
                blocks.append(
                    f'::: {entry.path}\n    options:\n'
                    f'      heading: {entry.name}\n      toc_label: {entry.name}'
                )
        pages[f'reference/registered/{page}.md'] = '\n\n'.join(blocks) + '\n'
    return pages


def _index_of(entries: List[Registered]) -> str:
    lines = [
        '# Registered names',
        '',
        '`import mapsage` registers these names; `custom_imports = '
        "dict(imports=['mapsage'])` in a config does so under any runner. "
        '[The config reference](../config.md#registered-names) says which hooks are on by '
        'default.',
        '',
        '| name | registry | what it is |',
        '|---|---|---|',
    ]
    for page, (_, registries) in REGISTRY_PAGES.items():
        lines += [
            f'| [`{entry.name}`]({page}.md#{entry.path}) | `{entry.registry}` | '
            f'{_in_cell(entry.about)} |'
            for entry in entries
            if entry.registry in registries
        ]
    return '\n'.join(lines) + '\n'


class _ParserReady(BaseException):
    """Carries the parser of a program, instead of parsing a command line with it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


# First words of a command line that choose another parser, by program.
_OTHER_PARSERS = {'prepare_data': ('coco', 'voc', 'scenes')}


def read_parser(module: str, *arguments: str) -> argparse.ArgumentParser:
    """Return the parser of a program without running the program.

    Args:
        module: Dotted path of a module with a function ``main()``.
        *arguments: Command line, for a program with several parsers.
    """

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _ParserReady(parser)

    program = importlib.import_module(module)
    with mock.patch.object(argparse.ArgumentParser, 'parse_known_args', stop), mock.patch.object(
        sys, 'argv', [module, *arguments]
    ):
        try:
            getattr(program, 'main', program.run)()
        except _ParserReady as ready:
            return ready.parser
    raise TypeError(f'{module}.main() parses no command line')


def commands_page() -> str:
    """Return the page of all commands and their options, as Markdown."""
    from mapsage_launcher import command

    blocks = [
        '# Commands',
        '`mapsage COMMAND`, or `python tools/PROGRAM.py` in a checkout. The options are those of '
        '`--help`. `mapsage launch` and the scripts start a program on all cards: '
        '[scripts](#scripts). [The config reference](config.md#commands) says how they work '
        'together.',
    ]
    for name, row in command.COMMANDS.items():
        parser = read_parser(row.module)
        parser.prog = f'mapsage {name}'
        blocks.append(f'## mapsage {name}')
        blocks.append(
            f'{(parser.description or "").strip()} In a checkout: `tools/{row.program}.py`.'
        )
        blocks += _options_of(parser)
        for word in _OTHER_PARSERS.get(row.program, ()):
            blocks += _options_of(read_parser(row.module, word), f'mapsage {name} {word}')
        if parser.epilog:
            blocks.append('```text\n' + parser.epilog.strip() + '\n```')
    blocks.append('## Scripts')
    blocks.append(
        '`mapsage launch [WORD]` runs the script of the same job; environment variables '
        'are their options.'
    )
    for word, script in command.LAUNCHED.items():
        header = command._read_header(command.shipped.SHIPPED / 'scripts' / script)
        blocks.append(f'### mapsage launch {word}')
        blocks.append(f'In a checkout: `bash scripts/{script}`.')
        blocks.append('```text\n' + header.strip('\n') + '\n```')
    return '\n\n'.join(blocks) + '\n'


def _options_of(parser: argparse.ArgumentParser, title: str = '') -> List[str]:
    rows, below = [], []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        if isinstance(action, argparse._SubParsersAction):
            for word, subparser in action.choices.items():
                below += _options_of(subparser, f'{parser.prog} {word}')
            continue
        formatter = parser._get_formatter()
        text = formatter._expand_help(action) if action.help else ''
        rows.append(f'| {_name_of(action)} | {_in_cell(text)} |')
    blocks = [f'### {title}'] if title else []
    if rows:
        blocks.append('\n'.join(['| argument | meaning |', '|---|---|', *rows]))
    return blocks + below


def _name_of(action: argparse.Action) -> str:
    value = action.metavar
    if value is None and action.choices is not None:
        value = '|'.join(map(str, action.choices))
    if isinstance(value, tuple):
        value = ' '.join(value)
    if not action.option_strings:
        name = value or action.dest
        return _code(f'[{name}]' if action.nargs in ('?', '*') else name)
    if action.nargs == 0:
        value = ''
    elif value is None:
        value = action.dest.upper()
    name = f'{", ".join(action.option_strings)} {value}'.strip()
    return _code(name) + (', required' if action.required else '')


def _code(text: str) -> str:
    return '`' + text.replace('|', r'\|') + '`'


def _in_cell(text: str) -> str:
    """Return a text as one cell of a Markdown table; it may have code, and no HTML."""
    pieces = re.split(r'(`[^`]*`)', re.sub(r'(?<!\\)\|', r'\\|', ' '.join(text.split())))
    return ''.join(
        piece if piece.startswith('`') else piece.replace('<', '&lt;').replace('*', r'\*')
        for piece in pieces
    )


def env_cfg_page() -> str:
    """Return the page of the fields of ``env_cfg``, as Markdown."""
    from dataclasses import fields

    from mapsage.engine.env_cfg import EnvCfg

    # `        name: Text.`, with lines that are indented further.
    texts = dict(
        re.findall(r'^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)', inspect.getdoc(EnvCfg) or '', re.M | re.S)
    )
    rows = []
    for field in fields(EnvCfg):
        # A message of the parser, which is no key.
        if field.name == 'note':
            continue
        key = field.metadata.get('key', _ENV_KEYS.get(field.name, field.name))
        kind = re.sub(r'Optional\[(\w+)\]', r'\1 or None', str(field.type))
        text = re.sub(r':\w+:`~?([^`]+)`', r'`\1`', texts[field.name]).replace('``', '`')
        rows.append(f'| `{key}` | {kind} | `{field.default!r}` | {_in_cell(text)} |')
    return '\n'.join(
        [
            '# env_cfg',
            '',
            'The fields that MapSage reads; [the config reference](config.md) tells more of each. The '
            'keys of MMEngine are `cudnn_benchmark`, `mp_cfg`, `resource_limit` and '
            '`dist_cfg.init_backend`.',
            '',
            '| key of `env_cfg` | type | default | meaning |',
            '|---|---|---|---|',
            *rows,
            '',
        ]
    )


# Field of EnvCfg -> its key, where they differ and the field has no rule.
_ENV_KEYS = {
    'backend': 'dist_cfg.backend',
    'timeout': 'dist_cfg.timeout',
    'cross_check_interval': 'cross_check.interval',
}


def generated_pages() -> Iterator[Tuple[str, str]]:
    """Return path in docs/ and Markdown of every page that is made from the code."""
    yield from registered_pages().items()
    yield 'reference/commands.md', commands_page()
    yield 'reference/env-cfg.md', env_cfg_page()
