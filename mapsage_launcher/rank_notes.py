"""Variables and files by which the launcher and its ranks inform each other.

Ranks leave notes in a folder of the launcher (`write_note` of `stop_request.py`): why they failed
(`mapsage/distributed/launcher_notes.py`, read by `ranks/failure_report.py`), requests to stop
(`stop_request.py`), encoders that have no head left (`ranks/leftover_encoders.py`). The other
variables and files concern elastic jobs alone (`nodes/`, see the extra `elastic`): ranks look for
them, or write them, in every job.
"""

from __future__ import annotations

from typing import Mapping, Optional

# Folder of the launcher's notes.
FOLDER_VARIABLE = 'MAPSAGE_ERROR_NOTES'
# MIN:MAX machines; only an elastic job has this variable.
ELASTIC_VARIABLE = 'MAPSAGE_ELASTIC'
# How often the machines have met; the same number on all machines.
ROUND_VARIABLE = 'MAPSAGE_ROUND'
# Number of virtual ranks of a run whose config does not say it: the ranks of the largest number of
# machines, even if some of them come later.
VIRTUAL_RANKS_VARIABLE = 'MAPSAGE_VIRTUAL_RANKS'
# Files in the folder of the launcher's notes, see also stop_request.py. Ranks write that their error
# comes from the settings or the data, or from a device of this machine.
FINAL_FILE, BROKEN_FILE = 'final', 'broken'


def expected_ranks(environ: Mapping[str, str]) -> Optional[int]:
    """Return the number of ranks with the largest number of machines; None in other jobs."""
    text = environ.get(VIRTUAL_RANKS_VARIABLE, '')
    return int(text) if text.isdigit() else None
