"""Blocks of pages: how they are found, what may be skipped, and how parts of configs are read."""

from __future__ import annotations

import re
from pathlib import Path

import page_blocks
import pytest
from page_blocks import KINDS, blocks_of, check_config, count_blocks, pages
from support import ROOT, main_leg

pytestmark = main_leg

PAGE = """# A page

```bash
echo run
```

<!-- test: skip card: a GCU -->
```bash
mapsage train
```

<!-- test: file a.py -->
```python
x = 1
```

```text
no code
```
"""


def test_blocks_and_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_blocks, 'DOCS', tmp_path)
    (tmp_path / 'a.md').write_text(PAGE)
    run, skipped, file = blocks_of('a.md')
    assert (run.line, run.code, run.skipped, run.file) == (4, 'echo run\n', '', '')
    assert skipped.skipped == 'card' and file.file == 'a.py'
    assert count_blocks(['a.md']) == {'run': 2, 'card': 1}
    (tmp_path / 'a.md').write_text(PAGE.replace('skip card: a GCU', 'skip weather: rain'))
    with pytest.raises(ValueError, match='skip weather: rain'):
        blocks_of('a.md')


def test_the_table_of_skipped_blocks_is_exact_and_only_falls() -> None:
    """docs/testing.md has how many blocks are skipped for which reason; more are not allowed."""
    text = (ROOT / 'docs' / 'testing.md').read_text()
    rows = dict(re.findall(r'^\| skipped: `(\w+)` \| (\d+) \|', text, re.MULTILINE))
    assert set(rows) == set(KINDS)
    counts = count_blocks(pages())
    assert {kind: counts[kind] for kind in KINDS} == {k: int(n) for k, n in rows.items()}, (
        'write fewer skipped blocks into docs/testing.md; more need a way to run them'
    )
    assert counts['run'] >= int(re.search(r'^\| run \| (\d+) \|', text, re.M)[1])  # type: ignore


@pytest.mark.parametrize('page', pages())
def test_orders_of_pages_are_known(page: str) -> None:
    blocks_of(page)


@pytest.mark.parametrize(
    'code, error',
    [
        ("custom_hooks = [dict(type='PreviewHook', max_images=2)]", None),
        ("custom_hooks = [dict(type='PreviewHok')]", "type='PreviewHok' is not registered"),
        ("custom_hooks = [dict(type='PreviewHook', images=2)]", 'takes no images'),
        ("feature_source = dict(type='Cached', folder='a', views=4)", None),
        ("feature_source = dict(type='Cached', folder='a', view=4)", 'takes no view'),
        ('optim_wrapper = dict(..., clip_grad=dict(max_norm=0.01))', None),
        ('a = {{_base_.train_dataloader.dataset}}', None),
    ],
)
def test_a_part_of_a_config_is_looked_up(code: str, error: str) -> None:
    if error is None:
        check_config(code)
    else:
        with pytest.raises((KeyError, TypeError), match=error):
            check_config(code)
