"""Pages: links and anchors, the navigation, and the reference against the code."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Iterator, List, Set

import pytest
import yaml
from page_blocks import blocks_of, pages
from support import ROOT, main_leg

from mapsage.engine import env_cfg
from mapsage_launcher.version import __version__

sys.path.insert(0, str(ROOT / 'scripts' / 'docs_site'))
import reference  # noqa: E402

DOCS = ROOT / 'docs'
PAGES = [*sorted(ROOT.glob('*.md')), *sorted(DOCS.rglob('*.md'))]
_FENCE = re.compile(r'^( *)(```+).*?^\1\2', re.DOTALL | re.MULTILINE)


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python objects."""


_Loader.add_multi_constructor('', lambda loader, suffix, node: None)
NAVIGATION: List[Any] = yaml.load((ROOT / 'mkdocs.yml').read_text(), _Loader)['nav']  # noqa: S506


def without_code(text: str) -> str:
    """Return a page without its blocks of code."""
    return _FENCE.sub('', text)


def anchors(path: Path) -> Set[str]:
    """Return the anchors of a page, as a code host and the site make them from its headings."""
    names: Set[str] = set()
    for heading in re.findall(r'^#+ (.*)$', without_code(path.read_text()), re.MULTILINE):
        text = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', heading.strip().lower())
        name = re.sub(r'[^\w\- ]', '', text).replace(' ', '-')
        names.add(next(n for n in (name, *(f'{name}-{i}' for i in range(1, 99))) if n not in names))
    return names


def links(path: Path) -> Iterator[str]:
    """Yield the links and pictures of a page that are no addresses."""
    text = re.sub(r'`[^`\n]*`', '', without_code(path.read_text()))
    for match in re.finditer(r'\]\(([^)\s]+)\)|(?:src|href)="([^"]+)"', text):
        target = match[1] or match[2]
        if not re.match(r'[a-z]+:', target):
            yield target


def navigation(entries: Any) -> Iterator[str]:
    """Yield the pages of mkdocs.yml."""
    if isinstance(entries, str):
        yield entries
    else:
        for entry in entries.values() if isinstance(entries, dict) else entries:
            yield from navigation(entry)


@pytest.mark.parametrize('page', PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page: Path) -> None:
    wrong = []
    for link in links(page):
        target, _, anchor = link.partition('#')
        path = Path(os.path.normpath(page.parent / target)) if target else page
        if not path.exists():
            wrong.append(f'{link}: no such file')
        elif anchor and path.suffix == '.md' and anchor not in anchors(path):
            wrong.append(f'{link}: no such heading')
    assert wrong == []


@pytest.mark.parametrize('page', PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_item_of_a_list_stands_twice(page: Path) -> None:
    """A merge that goes wrong leaves an old item next to its new wording."""
    items = re.findall(r'^ *- .{30,}', without_code(page.read_text()), re.MULTILINE)
    starts = [item[:40] for item in items if page.name != 'CHANGELOG.md']
    assert sorted(starts) == sorted(set(starts))


def test_commands_of_pages_exist_in_a_checkout() -> None:
    """Only an installed wheel has the command `mapsage`."""
    wrong = [
        page
        for page in pages()
        if 'first-hour' not in page
        and 'In a checkout' not in (DOCS / page).read_text()
        and any(
            re.search(r'^(?:\w+=\S+ )*mapsage ', block.code, re.MULTILINE)
            for block in blocks_of(page)
            if block.language == 'bash'
        )
    ]
    assert wrong == []


def test_every_page_is_in_the_navigation() -> None:
    listed = list(navigation(NAVIGATION))
    assert len(listed) == len(set(listed)), 'a page is there twice'
    missing = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob('*.md')} - set(listed)
    assert missing == set(), 'add them to `nav` in mkdocs.yml'


@main_leg
def test_every_registered_class_has_its_page() -> None:
    """The files of the code are read as text, so that a class that no import reaches is seen."""
    decorated = set()
    for path in (ROOT / 'mapsage').rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            for decorator in getattr(node, 'decorator_list', []):
                match = re.fullmatch(
                    r'(\w+)\.register_module\((?:name=\'(\w+)\')?.*\)',
                    ast.get_source_segment(path.read_text(), decorator) or '',
                )
                if match:
                    decorated.add((match[1], match[2] or node.name))
    assert len(decorated) > 70
    pages = reference.registered_pages()
    entries = reference.read_registries()
    assert decorated - {entry[:2] for entry in entries} == set()
    text = '\n'.join(pages.values())
    for entry in entries:
        assert f'\n::: {entry.path}\n    options:\n      heading: {entry.name}\n' in text
        assert f'[`{entry.name}`]' in pages['reference/registered/index.md']


@main_leg
def test_registered_classes_say_what_they_are() -> None:
    assert [entry.name for entry in reference.read_registries() if len(entry.about) < 15] == []


@main_leg
def test_every_argument_of_a_registered_class_has_its_meaning() -> None:
    missing = []
    for entry in reference.read_registries():
        module, _, name = entry.path.rpartition('.')
        kind = getattr(importlib.import_module(module), name)
        # Arguments that a class of ours inherits from the host are documented there.
        function = kind.__dict__.get('__init__') if inspect.isclass(kind) else kind
        if function is None:
            continue
        text = f'{kind.__doc__}\n{function.__doc__}'
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name in ('self', 'data_prefix', 'metainfo') or parameter.kind in (
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            ):
                continue
            pattern = rf'^\s*(\w+, )*{parameter.name}(, \w+)*(:| \()'
            if not re.search(pattern, text, re.MULTILINE):
                missing.append(f'{entry.path}: {parameter.name}')
    assert missing == []


def test_every_field_of_env_cfg_is_a_row() -> None:
    page = reference.env_cfg_page()
    assert '| `virtual_ranks` | int or None | `None` | Number of virtual ranks of the run.' in page
    keys = set(re.findall(r'^\| `([\w.]+)`', page, re.MULTILINE))
    own = set(env_cfg._KEYS) - {'cudnn_benchmark', 'mp_cfg', 'resource_limit', 'dist_cfg'}
    assert {key.replace('.interval', '') for key in keys if 'dist' not in key} == own
    hosts = {'dist_cfg.init_backend'}
    assert {key for key in keys if 'dist' in key} | hosts == {
        f'dist_cfg.{key}' for key in env_cfg._DIST_KEYS
    }


def _documented_env_cfg() -> Dict[str, Any]:
    text = (DOCS / 'reference' / 'config.md').read_text()
    block = next(
        code
        for code in re.findall(r'```python\n(.*?)```', text, re.DOTALL)
        if code.startswith('env_cfg = dict(\n    accelerator')
    )
    scope: Dict[str, Any] = {}
    exec(block, scope)  # noqa: S102
    return scope['env_cfg']


def test_every_key_of_env_cfg_is_documented_with_its_default() -> None:
    documented = _documented_env_cfg()
    assert set(documented) == set(env_cfg._KEYS)
    assert env_cfg.parse_env_cfg(documented) == env_cfg.EnvCfg()
    text = (DOCS / 'reference' / 'config.md').read_text()
    for key in env_cfg._DIST_KEYS:
        assert key in documented['dist_cfg'] or f'`dist_cfg.{key}`' in text


@main_leg
def test_every_command_and_option_is_documented() -> None:
    from mapsage_launcher import command

    page = reference.commands_page()
    for word, row in command.COMMANDS.items():
        assert f'\n## mapsage {word}\n' in page
        # The options that the source of the program adds, whatever the parser says.
        source = Path(importlib.import_module(row.module).__file__ or '').read_text()
        for option in re.findall(r"add_argument\(\s*'(--[a-z-]+)'", source):
            assert option in page, f'{row.module}: {option}'
    for word in command.LAUNCHED:
        assert f'\n### mapsage launch {word}\n' in page


@lru_cache(maxsize=None)
def _sources() -> str:
    return '\n'.join(
        path.read_text(errors='replace')
        for folder in ('mapsage', 'mapsage_launcher', 'scripts', 'configs')
        for path in sorted((ROOT / folder).rglob('*'))
        if path.suffix in ('.py', '.sh', '.cpp', '.h')
    )


def test_every_environment_variable_is_documented() -> None:
    page = (DOCS / 'reference' / 'environment.md').read_text()
    documented = set(re.findall(r'`(MAPSAGE_[A-Z_]+)`', page))
    # Items of a GeoTIFF's metadata have such names, too.
    used = set(re.findall(r'\bMAPSAGE_[A-Z_]+\b', _sources())) - {
        'MAPSAGE_CLASSES',
        'MAPSAGE_EMBEDDING',
    }
    assert used - documented == set(), 'in the code and not in docs/reference/environment.md'
    assert documented - used == set(), 'in docs/reference/environment.md and not in the code'
    for name in set(re.findall(r'`([A-Z_]+)`', page)) - documented:
        assert name in _sources(), name


def test_words_in_the_log_are_those_of_the_code() -> None:
    page = (DOCS / 'reference' / 'log-words.md').read_text()
    sources = _sources()
    for row in re.findall(r'^\| (`.*?`) \|', page.split('## Exit')[0], re.MULTILINE):
        for word in re.findall(r'`([^`]+)`', row):
            assert word in sources, f'{word}: no longer in the code'
    tags = set(re.findall(r"""['"](\[[A-Z][A-Za-z]+(?:-[A-Z]+)?\]) """, sources))
    assert {tag for tag in tags if f'`{tag}`' not in page} <= {'[simulator]'}


def test_the_citation_has_the_version_of_the_code() -> None:
    citation = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
    assert citation['version'] == __version__
    assert {'cff-version', 'title', 'authors', 'message', 'license'} <= set(citation)
