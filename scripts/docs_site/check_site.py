"""Check a built site: no page fetches from another host, and the search index has its words.

    python scripts/docs_site/check_site.py SITE

MkDocs itself checks links, anchors and the navigation. Links that a reader may follow to another
host are no fetches. The exit status is 1 if something is wrong.
"""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Dict, List, Optional, Tuple

# Words that a reader searches for, of an error, an option and a file format.
WORDS = ('device_ids', 'resume', 'GeoPackage')
# What a browser fetches by itself: element -> attributes.
_FETCHED = {
    'script': ('src',),
    'img': ('src', 'srcset'),
    'iframe': ('src',),
    'source': ('src',),
    'video': ('src',),
    'audio': ('src',),
    'object': ('data',),
    'embed': ('src',),
}
_FETCHED_LINKS = ('stylesheet', 'icon', 'preload', 'preconnect', 'prefetch', 'dns-prefetch')


class _Fetches(HTMLParser):
    """Collects addresses of other hosts that a page fetches."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: List[str] = []

    def handle_starttag(self, tag: str, attrs: List[Tuple[str, Optional[str]]]) -> None:
        values: Dict[str, str] = {name: value or '' for name, value in attrs}
        names = _FETCHED.get(tag, ())
        if tag == 'link' and any(kind in _FETCHED_LINKS for kind in values.get('rel', '').split()):
            names = ('href',)
        self.addresses += [
            values[name] for name in names if re.match(r'(https?:)?//', values.get(name, ''))
        ]


def find_fetches(site: Path) -> List[str]:
    """Return 'page: address' for what pages and style sheets fetch from other hosts."""
    wrong = []
    for path in sorted(site.rglob('*.html')):
        page = _Fetches()
        page.feed(path.read_text(encoding='utf-8'))
        wrong += [f'{path.relative_to(site)}: {address}' for address in page.addresses]
    for path in sorted(site.rglob('*.css')):
        text = path.read_text(encoding='utf-8')
        wrong += [
            f'{path.relative_to(site)}: {address}'
            for address in re.findall(r'url\(["\']?((?:https?:)?//[^)]+)', text)
        ]
    return wrong


def missing_words(site: Path) -> List[str]:
    """Return the words of ``WORDS`` that the index of the search does not have."""
    index = json.loads((site / 'search' / 'search_index.json').read_text(encoding='utf-8'))
    text = ' '.join(entry['title'] + ' ' + entry['text'] for entry in index['docs'])
    return [word for word in WORDS if word not in text]


def main() -> int:
    """Check the site that the command line names; return the exit status."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    site = Path(sys.argv[1])
    pages = list(site.rglob('*.html'))
    wrong = [f'fetched from another host: {fetch}' for fetch in find_fetches(site)]
    wrong += [f'not in the search index: {word}' for word in missing_words(site)]
    if not pages:
        wrong.append(f'{site} has no pages')
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        print(
            f'{len(pages)} pages in {site}: links, anchors and navigation are right, nothing is '
            f'fetched from another host'
        )
    return int(bool(wrong))


if __name__ == '__main__':
    sys.exit(main())
