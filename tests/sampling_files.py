"""Files that a run with dynamic sampling writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Sequence

import numpy as np

CLASSES = ('land', 'water')
PALETTE = np.array([[0, 90, 0], [0, 0, 255]], dtype=np.uint8)
SIDE = 96


def row(iteration: int, **changes: Any) -> Dict[str, Any]:
    """Return the record of a log interval that ends at an iteration."""
    figures: Dict[str, Any] = dict(
        iter=iteration,
        steps=50,
        attempts=10,
        rounds=14,
        judged=800,
        passed=400,
        not_finite=0,
        missing=3,
        moved_samples=100,
        sent_bytes=25 * 2**20,
        fetched=800,
        used=400,
        replicated=0,
        unfiltered=0,
        surplus=4,
        seconds=2.0,
        interval_seconds=40.0,
        shortfalls={'fallback': 1},
        dropped={'too_low': 300, 'expired': 100},
        world_size=8,
        global_target=16,
    )
    figures.update(changes)
    return figures


def record(folder: Path, rows: Sequence[Dict[str, Any]], torn: str = '') -> Path:
    """Write a run's steps.jsonl and return its path."""
    path = folder / 'dynamic_sampling' / 'steps.jsonl'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(json.dumps(each) + '\n' for each in rows) + torn)
    return path


def tile_arrays(kept: int = 5, dropped: int = 6, side: int = SIDE) -> Dict[str, np.ndarray]:
    """Return the arrays of tiles.npz."""
    rng = np.random.default_rng(0)
    arrays: Dict[str, np.ndarray] = dict(palette=PALETTE, classes=np.array(CLASSES))
    for kind, count in (('kept', kept), ('dropped', dropped)):
        arrays.update(
            {
                f'{kind}_images': rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8),
                f'{kind}_labels': rng.choice(np.array([0, 1, 255], np.uint8), (count, side, side)),
                f'{kind}_scores': np.linspace(0.1, 0.9, count),
                f'{kind}_iters': np.arange(count, dtype=np.int64),
            }
        )
    arrays['dropped_reasons'] = np.array(['too_high', 'too_low'] * 12)[:dropped]
    return arrays


def write_tiles(folder: Path, **changes: np.ndarray) -> Path:
    """Write a run's tiles.npz and return its path."""
    path = folder / 'dynamic_sampling' / 'tiles.npz'
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(str(path), **dict(tile_arrays(), **changes))
    return path


def iterations(rows: Sequence[Dict[str, Any]]) -> List[int]:
    """Return the iterations of records."""
    return [each['iter'] for each in rows]
