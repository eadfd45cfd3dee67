"""Choose the checkpoint to resume from: the newest one that can be read."""
from __future__ import annotations

import os
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Optional

from mmengine.runner import CheckpointLoader, find_latest_checkpoint

_NUMBERED = re.compile(r'^(?:iter|epoch)_(\d+)\.pth$')


class ResumeError(ValueError):
    """There is nothing to resume from."""


@dataclass(frozen=True)
class Choice:
    """A readable checkpoint.

    Attributes:
        path: Its file.
        seed: The seed of the run that wrote it, if it says.
        skipped: One line for each newer checkpoint that could not be read.
    """

    path: str
    seed: Optional[int]
    skipped: List[str]


def choose_checkpoint(work_dir: str, named: Optional[str] = None) -> Choice:
    """Return the checkpoint to resume from.

    Args:
        work_dir: Where the run writes its checkpoints.
        named: The checkpoint to try first, when the user named one (``load_from``).

    Raises:
        ResumeError: If there is none, or none of them can be read.
    """
    candidates = ([named] if named else []) + candidates_in(work_dir)
    if named and '://' in named:
        raise ResumeError(f'--resume: load_from={named!r} is not a local file. Download it first.')
    if not candidates:
        raise ResumeError(
            f'--resume: {work_dir} holds no checkpoint (iter_N.pth or epoch_N.pth). Start without '
            f'--resume, or give the --work-dir of the run to continue.')
    skipped: List[str] = []
    for path in candidates:
        try:
            checkpoint = CheckpointLoader.load_checkpoint(path, map_location='cpu')
            return Choice(path, _meta(checkpoint, path).get('seed'), skipped)
        except (OSError, RuntimeError, ResumeError, pickle.UnpicklingError) as error:
            skipped.append(f'{type(error).__name__}: {error}')
    raise ResumeError(
        f'--resume: none of the {len(candidates)} checkpoint(s) can be read. '
        + ' | '.join(skipped))


def candidates_in(work_dir: str) -> List[str]:
    """Return the checkpoints of ``work_dir``, the last written first."""
    numbered = [(int(match.group(1)), str(path)) for path in Path(work_dir).glob('*.pth')
                for match in [_NUMBERED.search(path.name)] if match]
    paths = [path for _, path in sorted(numbered, reverse=True)]
    last = find_latest_checkpoint(work_dir) if os.path.isfile(f'{work_dir}/last_checkpoint') else ''
    if last and os.path.isfile(last):
        # The same file may be listed under another path, so files are compared, not names.
        paths = [path for path in paths if not os.path.samefile(path, last)]
        paths.insert(0, last)
    return paths


def _meta(checkpoint: Any, path: str) -> dict:
    parts = {'meta', 'state_dict', 'message_hub', 'optimizer'}
    if not isinstance(checkpoint, dict) or not parts <= set(checkpoint):
        raise ResumeError(
            f"{path} is no checkpoint of a training run (those hold {', '.join(sorted(parts))}): "
            f'use load_from without --resume for weights alone')
    return checkpoint['meta']
