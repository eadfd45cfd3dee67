"""What MMEngine does for large runs, and for nothing in a test; importing this file leaves it out.

- A dataset collects garbage when it is made, over the hundreds of thousands of objects of a test
  session, 0.1 s each time. Python's own collections do for a dataset of a few tiles.
- Where a loader begins anew within an iteration-based loop, the loop sleeps for 2 s.
- The text of a config is formatted by yapf, 0.3 s a run. Without that it is one long line.
"""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Tuple

from mmengine.config import config
from mmengine.dataset import base_dataset
from mmengine.runner import loops
from yapf.yapflib import yapf_api


def _as_it_is(text: str, **settings: Any) -> Tuple[str, bool]:
    return text, False


yapf_api.FormatCode = _as_it_is
config.FormatCode = _as_it_is  # 0.10.7 has imported it
base_dataset.gc = SimpleNamespace(collect=lambda: 0)
loops.time = SimpleNamespace(sleep=lambda seconds: None)
