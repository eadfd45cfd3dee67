"""Scenarios of dynamic sampling on ranks forked from one process, for tests/distributed."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import torch
import torch.distributed as dist
from ranks import run_ranks

from mapsage.distributed import open_channel
from mapsage.sampling import DynamicSampler, Validity

PATIENT = 60.0  # seconds: a test that waits for this deadline is a test that fails


class Answers:
    """What the ranks of each scenario returned, by scenario."""

    def __init__(self, told: Dict[str, Any]) -> None:
        self._told = told

    def of(self, scenario: str) -> List[Any]:
        answer = self._told[scenario]
        assert isinstance(answer, list), answer
        return answer


def answers_of(run: Callable[..., Any], folder: Path, *args: Any) -> Answers:
    """Call ``run(folder, *args)``, a function of a test file, in a fresh process."""
    return Answers(run_ranks(run, 1, folder, folder, *args, timeout=800)[0])


def start() -> int:
    dist.init_process_group('gloo', timeout=timedelta(seconds=PATIENT))
    return dist.get_rank()


class Lines(logging.Handler):
    """Keep (level, text) of what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: List[Tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


def logger_with(lines: Lines) -> logging.Logger:
    logger = logging.Logger('test', logging.DEBUG)
    logger.addHandler(lines)
    return logger


def batches(rank: int, valid: Sequence[int], size: int = 16) -> Iterator[List[dict]]:
    """Yield batches of ``size`` samples of which the last ``valid[k]`` are valid."""
    for number, count in enumerate(valid):
        yield [
            dict(
                id=(rank, number, k),
                x=torch.full((k % 3 + 1, 2), float(rank)),
                score=float(k >= size - count),
            )
            for k in range(size)
        ]


def scores(samples: Sequence[dict]) -> List[float]:
    return [sample['score'] for sample in samples]


def sampler_of(source: Iterator[List[dict]], **settings: Any) -> DynamicSampler:
    options: dict = dict(validity=Validity(low=0.5), local_target=16)
    options.update(settings)
    options.setdefault('channel', open_channel(None, options.pop('timeout', None), 'sampling'))
    return DynamicSampler(lambda wanted: next(source), scores, **options)
