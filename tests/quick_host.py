"""What MMEngine and PyTorch do for large runs, and for nothing in a test; this file leaves it out.

- A dataset collects garbage when it is made, over the hundreds of thousands of objects of a test
  session, 0.1 s each time. Python's own collections do for a dataset of a few tiles.
- Where a loader begins again within an iteration-based loop, the loop sleeps for 2 s.
- The text of a config is formatted by yapf, 0.3 s a run. Without that it is one long line.
- PyTorch waits 5 s for each worker of a loader that is garbage, since in a cycle of references the
  queue that would tell the worker to end is finalized before the loader. After that it is killed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Tuple

from mmengine.config import config
from mmengine.dataset import base_dataset
from mmengine.runner import loops
from torch.utils.data import _utils
from yapf.yapflib import yapf_api


def _as_it_is(text: str, **settings: Any) -> Tuple[str, bool]:
    return text, False


yapf_api.FormatCode = _as_it_is
config.FormatCode = _as_it_is  # 0.10.7 has imported it
base_dataset.gc = SimpleNamespace(collect=lambda: 0)
loops.time = SimpleNamespace(sleep=lambda seconds: None)
_utils.MP_STATUS_CHECK_INTERVAL = 1.0
