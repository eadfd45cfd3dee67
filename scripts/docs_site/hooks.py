"""MkDocs hooks: pages from the code, and files of the repository that a page links to.

A link in docs/ that leaves docs/, such as one to a config, is right on a code host. In the site it
leads to a page that shows the file. CHANGELOG.md and CONTRIBUTING.md are pages of the site, too.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any, Dict

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]

# File of the repository -> its page.
PROJECT_PAGES = {
    'CHANGELOG.md': 'changelog.md',
    'CONTRIBUTING.md': 'contributing.md',
    'SECURITY.md': 'security-policy.md',
    'CODE_OF_CONDUCT.md': 'code-of-conduct.md',
}
_LINK = re.compile(r'(\]\()([^)#\s]+)((?:#[^)\s]*)?\))')
_CODE = re.compile(r'(^```.*?^```|`[^`\n]+`)', re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of docs/."""
    # MkDocs restores sys.path after it has loaded this file.
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    import notebooks
    import reference

    for notebook in sorted(notebooks.NOTEBOOKS.glob('*.ipynb')):
        files.append(
            File.generated(
                config,
                f'tutorials/notebooks/{notebook.stem}.md',
                content=notebooks.to_markdown(notebook),
            )
        )
    for path, text in reference.generated_pages():
        files.append(File.generated(config, path, content=text))
    for path, page in PROJECT_PAGES.items():
        text = (ROOT / path).read_text(encoding='utf-8')
        files.append(File.generated(config, page, content=text))
    for path, page in _linked_files(files).items():
        files.append(File.generated(config, page, content=_show(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links that leave docs/ to pages of the site."""
    folder = _folder_of(page.file.src_uri)
    if page.file.src_uri == 'index.md':
        # Pictures get the whole width. A head of the file would be a table on a code host.
        page.meta['hide'] = ['navigation', 'toc']
    elif page.file.src_uri == 'reference/mistakes.md':
        # The page is one wide table.
        page.meta['hide'] = ['toc']
    page.meta.setdefault('search', {}).setdefault('boost', _search_boost(page.file.src_uri))

    def lead(match: Any) -> str:
        target = _page_of(folder, match[2])
        if target is None:
            return match[0]
        start = os.path.dirname(page.file.src_uri) or '.'
        return match[1] + os.path.relpath(target, start) + match[3]

    pieces = _CODE.split(markdown)
    # Every second piece is code, in which nothing is a link. A table escapes the bars in its code
    # for code hosts; Python-Markdown would show the backslash.
    return ''.join(
        _unescape(piece) if i % 2 else _LINK.sub(lead, piece) for i, piece in enumerate(pieces)
    )


def _search_boost(page: str) -> float:
    """Return the factor of a page in the order of search results: what one follows comes first."""
    if page.startswith('tutorials/notebooks/'):
        # Their outputs hold many words, which no reader looks for.
        return 0.3
    if page.startswith(('tutorials/', 'how-to/')) and '.zh-CN' not in page:
        return 2
    # Pages made from the code hold every class and option: who knows such a name finds it by its title.
    made = page.startswith(('reference/registered/', 'reference/commands'))
    return 1 if page.startswith('reference/') and not made else 0.5


def _unescape(code: str) -> str:
    return code if code.startswith('```') else code.replace(r'\|', '|')


def _folder_of(page: str) -> str:
    """Return the folder in the repository to which links of a page are relative."""
    if page in PROJECT_PAGES.values():
        return '.'
    return os.path.dirname(f'docs/{page}')


def _page_of(folder: str, link: str) -> Any:
    """Return the page of the site for a link, or None if the link stands as it is."""
    if re.match(r'[a-z]+:|/', link):
        return None
    path = os.path.normpath(os.path.join(folder, link))
    if path in PROJECT_PAGES:
        return PROJECT_PAGES[path]
    if path.startswith('docs/'):
        return path[len('docs/') :]
    if (ROOT / path).exists():
        return f'files/{path}.md'
    return None


def _linked_files(files: Files) -> Dict[str, str]:
    """Return the files and folders outside docs/ to which pages link, with their pages."""
    linked = {}
    for file in files.documentation_pages():
        for match in _LINK.finditer(_CODE.sub('', file.content_string)):
            page = _page_of(_folder_of(file.src_uri), match[2])
            if page is not None and page.startswith('files/'):
                linked[page[len('files/') : -len('.md')]] = page
    return linked


def _show(path: str) -> str:
    """Return a page that shows a file, or the names in a folder."""
    source = ROOT / path
    head = f'---\nsearch: {{exclude: true}}\nhide: [navigation, toc]\n---\n\n# {path}\n\n'
    if source.is_dir():
        return head + '\n'.join(f'- `{child.name}`' for child in sorted(source.iterdir())) + '\n'
    language = {'.py': 'python', '.sh': 'bash', '.toml': 'toml'}.get(source.suffix, 'text')
    text = source.read_text(encoding='utf-8')
    if len(text) > 200_000:
        text = text[:200_000] + '\n...'
    return f'{head}````{language}\n{text}\n````\n'
