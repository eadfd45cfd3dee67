"""Processes that compute the rewards of label maps beside the training process.

A reward such as the number of components takes milliseconds a map, and every step judges some
dozens of maps. The processes are forks, as the loader's workers are: they have the reward
functions, also those that cannot be pickled, and use neither the model nor a device.
"""

from __future__ import annotations

import multiprocessing
import signal
import weakref
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Callable, List, Sequence, Tuple

import cv2
import numpy as np

from mapsage.distributed.launcher import die_with_parent
from mapsage.evaluation.rewards import reward_of

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
