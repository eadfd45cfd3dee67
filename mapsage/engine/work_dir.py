"""One training at a time in a work dir."""
from __future__ import annotations

import logging
import os
from contextlib import ExitStack, contextmanager
from typing import Iterator

from mmengine.dist import is_main_process

from mapsage.distributed import all_ranks_or_none
from mapsage.distributed.nodes.elastic import ELASTIC_VARIABLE
from mapsage.folder_claims import claimed

_ADVICE = 'Wait for its end, stop it, or choose another --work-dir.'


@contextmanager
def alone_in_work_dir(work_dir: str, logger: logging.Logger) -> Iterator[None]:
    """Keep other trainings out of a work dir while the block runs. Collective at its beginning.

    Rank 0 holds the claim for all ranks. The parts of an elastic job, one of which may be frozen or
    cut off, do not stop each other: the lease says which of them writes.

    Args:
        work_dir: Folder of the run, which exists.
        logger: Logger for a warning where the file system has no locks.

    Raises:
        FolderClaimedError: On rank 0, if another training writes there; RankError on the others.
    """
    job = os.environ.get('TORCHELASTIC_RUN_ID', '') if ELASTIC_VARIABLE in os.environ else ''
    with ExitStack() as stack:
        with all_ranks_or_none('claiming the work dir'):
            if is_main_process():
                warning = stack.enter_context(claimed(work_dir, ['the training'], _ADVICE, job))
                if warning:
                    logger.warning(warning)
        yield
