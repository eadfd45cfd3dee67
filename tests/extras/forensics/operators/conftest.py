"""The room needs torch 2: its tests are left out where torch has no TorchDispatchMode."""

from __future__ import annotations

from typing import List

from mapsage.extras.forensics.operators.dispatch import HAS_DISPATCH_MODE

collect_ignore_glob: List[str] = [] if HAS_DISPATCH_MODE else ['test_[!d]*.py']
