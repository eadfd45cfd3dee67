"""One training at a time in a work dir.

Two trainings would overwrite each other's checkpoints. The claim is a locked file, see
``mapsage/folder_claims.py``.
"""
from __future__ import annotations

import logging
import os
from contextlib import ExitStack, contextmanager
from typing import Iterator

from mmengine.dist import is_main_process

from mapsage.distributed import RankError, all_ranks_or_none
from mapsage.folder_claims import FolderClaimedError, claimed
from mapsage_launcher.nodes.elastic import ELASTIC_VARIABLE

_ADVICE = 'Wait for its end, stop it, or choose another --work-dir.'


@contextmanager
def alone_in_work_dir(work_dir: str, logger: logging.Logger) -> Iterator[None]:
    """Keep other trainings out of a work dir while the block runs. Collective at its beginning.

    Rank 0 holds the claim for all ranks. The nodes of an elastic job share a claim, because one
    that is frozen or cut off must not stop the others; the writer's lease decides which of them
    writes.

    Args:
        work_dir: Folder of the run, which exists.
        logger: Logger for a warning if the file system has no locks.

    Raises:
        FolderClaimedError: On every rank, if another training writes there.
    """
    job = os.environ.get('TORCHELASTIC_RUN_ID', '') if ELASTIC_VARIABLE in os.environ else ''
    with ExitStack() as stack:
        try:
            with all_ranks_or_none('claiming the work dir'):
                if is_main_process():
                    warning = stack.enter_context(claimed(work_dir, ['the training'], _ADVICE, job))
                    if warning:
                        logger.warning(warning)
        except RankError as error:
            name, _, text = error.text.partition(': ')
            if name != FolderClaimedError.__name__:
                raise
            # Raised again without the rank, because no rank is to blame.
            raise FolderClaimedError(text) from error
        yield
