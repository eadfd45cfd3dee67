"""What a rank leaves for its launcher when it fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mapsage.distributed.launcher_notes import note_for_launcher
from mapsage_launcher.rank_notes import FINAL_FILE
from mapsage_launcher.ranks.failure_report import read_notes


@pytest.mark.parametrize('ranks', [1, 64, 4096])
def test_a_note_that_blames_many_ranks_is_written(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, 'MAPSAGE_ERROR_NOTES', str(tmp_path))
    monkeypatch.setitem(os.environ, 'RANK', '7')
    note_for_launcher('the cause', FINAL_FILE, range(1000, 1000 + ranks))
    (note,) = read_notes(tmp_path)
    assert (note.rank, note.text) == (7, 'the cause')
    assert note.blamed == list(range(1000, 1000 + min(ranks, 32)))
    assert (tmp_path / FINAL_FILE).exists()
