"""The HTML report of one run.

`write_report` puts the sections of `sections.py` and `class_sections.py` into one page. A section
that fails is replaced by a note, because the rest of the report is still useful. The page loads
nothing and runs no script, so it can be mailed and opened offline.
"""

from __future__ import annotations

from pathlib import Path
from typing import Callable, List, Optional, Union

from mapsage.base.files import atomic_write
from mapsage.version import __version__

from . import class_sections, sections
from .charts import text
from .runs import find_run

REPORT = 'report.html'

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --faint: #5b636d; --paper: #fff; --line: #d5dae0;
  --fill: #0072b2; --up: #00734f; --down: #b8400a; --panel: #f5f7f9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf2; --faint: #9aa5b1; --paper: #161b22;
  --line: #37414d; --fill: #3f9bd8; --up: #4fc79b; --down: #ff9157; --panel: #1f2630; } }
body { margin: 0 auto; max-width: 1100px; padding: 20px 24px 60px; background: var(--paper);
  color: var(--ink); font: 15px/1.45 system-ui, "Noto Sans CJK SC", "Microsoft YaHei", sans-serif; }
h1 { font-size: 22px; margin: 0 0 12px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 34px 0 6px; border-bottom: 1px solid var(--line); }
h3 { font-size: 14px; margin: 14px 0 4px; overflow-wrap: anywhere; }
.note, footer { color: var(--faint); margin: 4px 0 10px; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 12px 3px 0; text-align: left; vertical-align: top; }
th { font-weight: 500; }
thead th { color: var(--faint); font-size: 13px; border-bottom: 1px solid var(--line); }
.facts th { color: var(--faint); min-width: 90px; }
.figures td, .figures thead th:not(:first-child) { text-align: right; white-space: nowrap; }
.best { font-weight: 700; }
.bar { display: inline-block; min-width: 170px; padding: 0 6px; border-radius: 2px;
  background: linear-gradient(90deg, color-mix(in srgb, var(--fill) 35%, transparent) var(--p),
  var(--panel) var(--p)); }
.up { color: var(--up); } .down { color: var(--down); } .same, .none { color: var(--faint); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: 16px; }
.chart { margin: 0; } .chart svg { width: 100%; display: block; }
.chart polyline { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.chart line { stroke: var(--line); stroke-width: 1; }
.chart text { font-size: 11px; fill: var(--faint); }
.legend { font-size: 12px; color: var(--faint); min-height: 1.4em; }
.legend span { margin-right: 12px; white-space: nowrap; }
.legend i { display: inline-block; width: 12px; height: 3px; margin-right: 4px;
  vertical-align: 3px; }
.confusion { border-collapse: separate; border-spacing: 1px; font-size: 13px; }
.confusion td { background: color-mix(in srgb, var(--fill) var(--s, 0%), var(--panel));
  min-width: 46px; padding: 7px 2px; text-align: center; }
.confusion td.dark { color: #fff; } .confusion td.none { background: var(--line); }
.confusion th { vertical-align: middle; }
.confusion thead th { vertical-align: bottom; padding: 4px 2px; border: 0; }
.confusion thead span { writing-mode: vertical-rl; transform: rotate(180deg); margin: 0 auto; }
.confusion.small { font-size: 9px; border-spacing: 0; } .confusion.small td { min-width: 8px;
  padding: 0; height: 10px; } .confusion.small th { padding: 0 4px 0 0; }
img { max-width: 100%; height: auto; border: 1px solid var(--line); background: #fff; }
pre, code { font: 12.5px/1.4 ui-monospace, monospace; }
pre { background: var(--panel); padding: 8px 10px; overflow-x: auto; margin: 4px 0; }
code { overflow-wrap: anywhere; }
footer { margin-top: 34px; }
.config td { min-width: 64px; max-width: 520px; overflow-wrap: anywhere; }
"""


def write_report(
    path: Union[str, Path], out: Union[str, Path, None] = None, brief: bool = False
) -> Path:
    """Write the report of a run; a reader never sees a half-written file.

    Args:
        path: Work dir, for its last run; or the folder of one start, ``WORK_DIR/TIMESTAMP``.
        out: File to write; None for ``report.html`` in that folder.
        brief: Whether to leave out the picture of dynamic sampling. It takes a second or two, which
            a running training should not wait for.

    Returns:
        Path of the file.

    Raises:
        ReportError: If the folder contains no run.
        OSError: If the file cannot be written.
    """
    run, previous = find_run(path)
    section_makers: List[Callable[[], str]] = [
        lambda: sections.overview(run, previous),
        lambda: sections.curves(run),
        lambda: class_sections.classes(run, previous),
        lambda: class_sections.confusion(run),
        lambda: sections.pictures(run),
        lambda: '' if brief else sections.sampling(run),
        lambda: sections.config(run, previous),
        lambda: sections.devices(run),
        lambda: sections.starts(run),
    ]
    config = run.config_name[:-3] if run.config_name.endswith('.py') else run.config_name
    title = config if config == run.name else f'{config} ({run.name})'
    html = page(title, [guarded(maker) for maker in section_makers])
    target = Path(path) / REPORT if out is None else Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(target, html.encode('utf-8', 'backslashreplace'))
    return target


def guarded(make_section: Callable[[], str]) -> str:
    """Return a section of a page, or a note with the error if it cannot be made."""
    try:
        return make_section()
    except Exception as error:
        # For example a damaged file or a record of another version: the other sections are still
        # useful, and the page names the error.
        return (
            f'<section><p class="note">A part of the report could not be made: '
            f'{text(type(error).__name__)}: {text(error)}</p></section>'
        )


def page(title: str, sections_html: List[str], heading: Optional[str] = None) -> str:
    """Return a page that loads no other file and runs no script."""
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"img-src data:; style-src 'unsafe-inline'\">"
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{text(title)}</title><style>{_STYLE}</style></head><body>'
        f'<h1>{text(heading or title)}</h1>{"".join(sections_html)}'
        f'<footer>MapSage {text(__version__)}</footer></body></html>\n'
    )
