"""Pieces of HTML that all pages of reports are made of: sections, tables, pictures, numbers, times.

Text from outside (names, errors, config values) must pass through `text` of `charts.py`, which
escapes it. A cell of `table` is already HTML.
"""

from __future__ import annotations

import time
from typing import Iterable, Optional, Sequence

from .charts import text


def section(title: str, body: str, note: str = '') -> str:
    """Return a section of the page; '' if body and note are empty."""
    if not body and not note:
        return ''
    paragraph = f'<p class="note">{text(note)}</p>' if note else ''
    return f'<section><h2>{text(title)}</h2>{paragraph}{body}</section>'


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), kind: str = '') -> str:
    """Return a table with cells that are HTML; the first cell of a row is its heading."""
    top = f'<thead><tr>{"".join(f"<th>{cell}</th>" for cell in head)}</tr></thead>' if head else ''
    body = ''.join(
        f'<tr><th>{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return f'<div class="wide"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'


def picture(url: Optional[str], name: str) -> str:
    """Return an image of the page; without a URL, a note that the picture is unreadable."""
    if url is None:
        return f'<p class="note">The picture of {text(name)} cannot be read.</p>'
    return f'<img src="{url}" alt="{text(name)}">'


def bar(value: Optional[float]) -> str:
    """Return a percentage with a bar in the background."""
    if value is None:
        return '<span class="none">undefined</span>'
    return f'<span class="bar" style="--p:{max(0.0, min(100.0, value)):.1f}%">{value:.2f}</span>'


def figure(value: Optional[float]) -> str:
    """Return a percentage as text; '' if it is undefined."""
    return '' if value is None else f'{value:.2f}'


def change(now: Optional[float], previous: Optional[float]) -> str:
    """Return a difference with its sign, colored."""
    if now is None or previous is None:
        return ''
    difference = now - previous
    kind = 'up' if difference > 0.005 else 'down' if difference < -0.005 else 'same'
    return f'<span class="{kind}">{difference:+.2f}</span>'


def date(seconds: float) -> str:
    """Return a time as text in this machine's time zone."""
    return time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(seconds))


def duration(seconds: float) -> str:
    """Return a duration as text.

    Example:
        >>> duration(42), duration(303), duration(25920)
        ('42 s', '5 min 3 s', '7 h 12 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f'{whole} s'
    if whole < 3600:
        return f'{whole // 60} min {whole % 60} s'
    return f'{whole // 3600} h {whole % 3600 // 60} min'
