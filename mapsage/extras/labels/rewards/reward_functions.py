"""The sum of users' reward functions, with errors that name the function.

Ranks must not use different rewards, but functions cannot be compared. So every rank describes its
rewards by their values on two fixed label maps, and the ranks compare the descriptions.

A reward such as the number of components takes milliseconds a map, and every step judges some
dozens of maps. Processes compute them in parallel to the training. They are forks, as the loader's
workers are: they have the reward functions, also those that cannot be pickled, and use neither the
model nor a device.
"""

from __future__ import annotations

import multiprocessing
import signal
import weakref
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Callable, List, Optional, Sequence, Set, Tuple

import cv2
import numpy as np
from mmengine.logging import print_log

from mapsage.distributed.launcher import die_with_parent

from .rewards import build_rewards, reward_name, reward_names, reward_of

# Side in pixels of the label maps by which ranks compare their rewards.
_SIDE = 24


class Rewards:
    """K reward functions of label maps, and their weighted sum.

    Args:
        functions: Configs of TASK_UTILS, or callables.
        weights: Weight of each function; 1 for all when None.
        workers: Number of processes that compute the rewards; 0: this process does. They start with
            the first label maps.

    Attributes:
        names: Name of each function.

    Raises:
        ValueError: If there is no function, an element is not a function, or a weight is missing or
            not finite.
    """

    def __init__(
        self, functions: Sequence[Any], weights: Optional[Sequence[float]] = None, workers: int = 0
    ) -> None:
        self._weights = [1.0] * len(functions) if weights is None else list(weights)
        if len(self._weights) != len(functions) or not np.isfinite(self._weights).all():
            raise ValueError(
                f'{len(functions)} reward function(s) and the weights '
                f'{self._weights}, expected a number for each.'
            )
        if workers < 0:
            raise ValueError(f'workers={workers}, expected 0 or a number of processes.')
        self._functions = build_rewards(functions)
        self.names = reward_names(self._functions)
        self._warned: Set[str] = set()
        self._count = workers
        self._workers: Optional[RewardWorkers] = None

    def __call__(self, maps: np.ndarray, truth: np.ndarray, tiles: Sequence[str]) -> np.ndarray:
        """Return the reward of every label map and function, float64 ``(N, G, K)``.

        A function's first reward that is not finite is logged.

        Args:
            maps: Label maps, int64 ``(N, G, H, W)``.
            truth: True labels, int64 ``(N, H, W)``.
            tiles: Names of the N tiles, for messages.

        Raises:
            ValueError: If a function does not return a number.
        """
        pairs = [(label_map, labels) for group, labels in zip(maps, truth) for label_map in group]
        if self._count and self._workers is None:
            self._workers = RewardWorkers(self._functions, self._count)
        rewards: List[List[float]] = (
            [rewards_of(self._functions, pair) for pair in pairs]
            if self._workers is None
            else self._workers.rewards(pairs)
        )
        values = np.array(rewards, np.float64).reshape(*maps.shape[:2], len(self._functions))
        for tile, tile_values in zip(tiles, values):
            self._warn_of_tile(tile, tile_values)
        return values

    def total(self, values: np.ndarray) -> np.ndarray:
        """Return weighted sums ``(N, G)`` of rewards ``(N, G, K)``; NaN if one is not finite."""
        # Column by column: a matrix product may round equal rewards of two maps differently.
        total = np.zeros(values.shape[:2])
        for weight, column in zip(self._weights, np.moveaxis(values, -1, 0)):
            total += weight * np.where(np.isfinite(column), column, np.nan)
        return total

    def _warn_of_tile(self, tile: str, values: np.ndarray) -> None:
        """Log the functions whose reward of a tile is not finite for the first time."""
        for function, column in zip(self._functions, values.T):
            name = reward_name(function)
            bad = column[~np.isfinite(column)]
            if len(bad) and name not in self._warned:
                self._warned.add(name)
                print_log(
                    f'[GroupRewards] the reward {name} is {bad[0]} for '
                    f'{tile}: the tile is left out and counted as not_finite. Further such '
                    f'tiles are treated alike, without a message.',
                    logger='current',
                    level=30,
                )

    def describe(self) -> str:
        """Return names, weights, and the rewards of two label maps, as a text.

        Raises:
            ValueError: If a function does not return a number.
        """
        rows, columns = np.indices((_SIDE, _SIDE))
        truth = (rows // 9 + columns // 7) % 3
        maps = [truth, np.where((rows * 5 + columns * 3) % 11 == 0, (truth + 1) % 3, truth)]
        return ', '.join(
            f'{weight:g} {reward_name(function)} '
            f'{[reward_of(function, label_map, truth) for label_map in maps]}'
            for function, weight in zip(self._functions, self._weights)
        )


RewardFunction = Callable[[np.ndarray, np.ndarray], Any]
# A predicted label map and the truth, (H, W).
Pair = Tuple[np.ndarray, np.ndarray]


def rewards_of(functions: Sequence[RewardFunction], pair: Pair) -> List[float]:
    """Return the reward of each function for a label map.

    Raises:
        ValueError: If a function does not return a number.
    """
    predicted, truth = (labels.astype(np.int64) for labels in pair)
    return [reward_of(function, predicted, truth) for function in functions]


class RewardWorkers:
    """Some processes that share the label maps of a batch.

    Args:
        functions: Reward functions.
        count: Number of processes, at least 1.
    """

    def __init__(self, functions: Sequence[RewardFunction], count: int) -> None:
        context = multiprocessing.get_context('fork')
        self._pipes: List[Connection] = []
        self._processes: List[BaseProcess] = []
        for _ in range(count):
            pipe, workers_end = context.Pipe()
            process = context.Process(target=_serve, args=(workers_end, functions), daemon=True)
            process.start()
            workers_end.close()
            self._pipes.append(pipe)
            self._processes.append(process)
        # Runs at the end of the interpreter, too, before multiprocessing waits for the processes.
        weakref.finalize(self, _kill, self._processes)

    def rewards(self, pairs: Sequence[Pair]) -> List[List[float]]:
        """Return the rewards of label maps, in their order.

        Raises:
            Exception: The error of a reward function, as the function raised it.
            RuntimeError: If a process has ended.
        """
        count = len(self._pipes)
        results: List[List[float]] = [[] for _ in pairs]
        errors: List[BaseException] = []
        try:
            for number, pipe in enumerate(self._pipes):
                pipe.send([_small(pair) for pair in pairs[number::count]])
            # Every reply is read before an error is raised, so that the next batch gets its own.
            for number, pipe in enumerate(self._pipes):
                reply = pipe.recv()
                if isinstance(reply, BaseException):
                    errors.append(reply)
                else:
                    results[number::count] = reply
        except (EOFError, ConnectionError) as error:
            statuses = [process.exitcode for process in self._processes]
            raise RuntimeError(
                f'a process that computes rewards has ended (exit statuses {statuses}; -9 is '
                f'mostly want of memory). Set workers={count // 2} of GroupRewardTuning, or find '
                f'out what ended it.'
            ) from error
        if errors:
            raise errors[0]
        return results


def _serve(pipe: Connection, functions: Sequence[RewardFunction]) -> None:
    """Answer batches of label maps until the training process ends."""
    # A request to stop is for the training process, which still finishes its step.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    # The threads of OpenCV do not survive the fork.
    cv2.setNumThreads(0)
    while True:
        try:
            pairs = pipe.recv()
        except EOFError:
            return
        reply: Any
        try:
            reply = [rewards_of(functions, pair) for pair in pairs]
        except Exception as error:  # raised again in the training process
            reply = _portable(error)
        pipe.send(reply)


def _portable(error: Exception) -> Exception:
    """Return an error that can be pickled, with the same text."""
    try:
        multiprocessing.reduction.ForkingPickler.dumps(error)
    except Exception:  # whatever the user's class does when it is pickled
        return RuntimeError(f'{type(error).__name__}: {error}')
    return error


def _small(pair: Pair) -> Pair:
    """Return label maps as uint8 where their values allow it."""
    predicted, truth = pair
    if min(predicted.min(), truth.min()) < 0 or max(predicted.max(), truth.max()) > 255:
        return pair
    return predicted.astype(np.uint8), truth.astype(np.uint8)


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()
