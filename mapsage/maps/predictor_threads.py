"""Several threads of a CPU compute windows, each a batch of its own.

PyTorch divides every operator of a batch among its threads, and they wait for each other after each
operator. Threads with a batch each do not: two of them compute 1.35 times as many windows of 256
pixels a second as two that share a batch (docs/benchmarks.md).
"""

from __future__ import annotations

import queue
from typing import List, Sequence, Tuple, Union

import numpy as np
import torch

from .predictor import WindowPredictor

# Each thread needs the memory of a batch's activations.
_MOST_PARALLEL = 4


def divide_threads(threads: int) -> Tuple[int, int]:
    """Return the number of batches to compute at a time, and PyTorch's threads for each.

    As few threads as possible are left over, and then as many batches as possible are computed.
    Up to four threads compute a batch each, with the bits of PyTorch with a single thread.

    Args:
        threads: Number of threads, 1 or more.
    """
    parallel = max(
        range(1, min(threads, _MOST_PARALLEL) + 1),
        key=lambda count: (count * (threads // count) if count > 1 else 0, count),
    )
    return parallel, threads // parallel


class ThreadedPredictor:
    """Implements :class:`mapsage.maps.strips.Predictor` with several replicas of a predictor.

    Args:
        predictor: Predictor on the CPU.
        threads: Number of threads that compute.

    Attributes:
        scores, threshold, weights: Those of the predictor.
        parallel: Number of threads that may compute a batch at the same time; 1 if the model cannot
            be copied.
    """

    def __init__(self, predictor: WindowPredictor, threads: int) -> None:
        self.scores, self.threshold = predictor.scores, predictor.threshold
        self.weights = predictor.weights
        self.parallel, self._threads_each = divide_threads(threads)
        try:
            replicas: List[WindowPredictor] = [
                predictor,
                *(predictor.replica() for _ in range(self.parallel - 1)),
            ]
        # copy.deepcopy raises the first for objects such as locks, and PyTorch the second for
        # tensors that a module has computed with a gradient.
        except (TypeError, RuntimeError):
            self.parallel, self._threads_each, replicas = 1, threads, [predictor]
        self._free: queue.SimpleQueue[WindowPredictor] = queue.SimpleQueue()
        for replica in replicas:
            self._free.put(replica)

    def stack(self, windows: Sequence[np.ndarray]) -> np.ndarray:
        """Return windows as a batch."""
        return np.stack(windows)

    def __call__(self, windows: Union[np.ndarray, torch.Tensor]) -> np.ndarray:
        """Return the weighted scores of a batch, as :class:`WindowPredictor` does.

        Threads may call this at the same time; more than :attr:`parallel` wait for each other.
        """
        predictor = self._free.get()
        try:
            # The number belongs to the calling thread.
            torch.set_num_threads(self._threads_each)
            return predictor(windows)
        finally:
            self._free.put(predictor)
