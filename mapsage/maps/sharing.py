"""Share the maps of a folder among all ranks of all jobs: claim, predict, assemble, help the others.

Every rank is a separate worker (`ledger.py`). It goes through all maps until the last is finished.
It claims runs of strips; the worker that finds all strips of a map finished claims the
assembly. Claims lie in the folder of the map's strips and go with it.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from mapsage.base.progress import ProgressLine
from mapsage.geo import GeoError

from .errors import BrokenInputError, PredictError
from .ledger import PAUSE_SECONDS, LapsedError, Worker
from .map_job import MapJob
from .map_model import Predictor
from .strips import Waits

# Most strips of a run. The row of windows above a run is computed by its neighbor, too.
_MOST_STRIPS = 8
# Characters of a setting in an error.
_MOST_CHARACTERS = 80


def run_length(strips: int, workers: int) -> int:
    """Return the number of strips that are claimed together, so that each worker has a share."""
    return max(1, min(_MOST_STRIPS, strips // max(1, workers)))


def shared_plan(
    plans: Mapping[str, Any],
    names: Sequence[str],
    settings: Mapping[str, Any],
    required: Mapping[str, Any],
    overwrite: bool,
) -> Dict[str, Any]:
    """Return what the living jobs that make some of this job's maps have decided.

    Args:
        plans: Plans of the living jobs by description of the job; None if one cannot be read.
        names: Names of this job's maps.
        settings: What the files of all maps of a job depend on.
        required: The decisions that this job cannot change.
        overwrite: Whether this job wants to make existing maps again.

    Returns:
        ``decisions``, ``run_length`` and ``scenes`` (by name of the map); empty without such a job.

    Raises:
        PredictError: If this job would make other bytes than the others.
    """
    shared: Dict[str, Any] = {}
    for job, plan in plans.items():
        if not _is_plan(plan):
            raise PredictError(
                f'{job} works in this folder, and its plan cannot be read: it may run another '
                f'version of MapSage. Wait for its end, stop it, or choose another --out.'
            )
        common = [name for name in names if name in plan['names']]
        if not common:
            continue
        advice = f'{job} makes {common[0]}. Wait for its end, stop it, or choose another --out.'
        if overwrite:
            raise PredictError(f'--overwrite makes maps again that others work on: {advice}')
        refuse_differences(settings, plan['settings'], advice)
        decided = {**required, **shared.get('decisions', {})}
        decisions = {name: plan['decisions'].get(name) for name in decided}
        refuse_differences(decided, decisions, advice)
        shared.setdefault('decisions', plan['decisions'])
        shared.setdefault('run_length', plan['run_length'])
        scenes = {scene['name']: scene for scene in plan['scenes']}
        shared['scenes'] = {**scenes, **shared.get('scenes', {})}
    return shared


def refuse_differences(
    this: Mapping[str, Any],
    other: Mapping[str, Any],
    advice: str,
) -> None:
    """Raise an error that names what two jobs would do differently, with both values.

    Args:
        this, other: Settings of this job and of another job.
        advice: End of the error's text.
    """
    different = [
        f'{name} {_shorten(this.get(name))} here and {_shorten(other.get(name))} there'
        for name in {**this, **other}
        if this.get(name) != other.get(name)
    ]
    if different:
        raise PredictError(
            f'jobs that share maps need the same settings, and these differ: '
            f'{"; ".join(different)}. {advice}'
        )


class SharedWork:
    """This rank's work on maps, which other ranks and jobs work on, too.

    Args:
        worker: This rank's entry in the ledger; closed after an error.
        begin: Where in the list of maps, and in each map, this rank begins, from 0 to below 1.
        predictor: The model.
        batch_size: Largest number of windows in a batch.
        progress: Shows the windows of all workers.

    Attributes:
        seconds: Seconds in which this rank predicted.
        waits: Its waits in these seconds.
        broken: Name of a map whose input is broken -> reason.
    """

    def __init__(
        self,
        worker: Worker,
        begin: float,
        predictor: Predictor,
        batch_size: int,
        progress: ProgressLine,
    ) -> None:
        self._worker, self._begin, self._progress = worker, begin, progress
        self._predictor, self._batch_size = predictor, batch_size
        self.seconds, self.waits = 0.0, Waits()
        self.broken: Dict[str, str] = {}

    def finish(self, jobs: Sequence[MapJob], skip_broken: bool = False) -> None:
        """Work until all maps are finished, by this rank or by others.

        Args:
            jobs: The maps.
            skip_broken: Whether maps whose input is broken are left out.

        Raises:
            GeoError, PredictError: If a map cannot be made.
        """
        left = rotate(jobs, self._begin)
        with ExitStack() as after_error:
            # Others take over what this worker has claimed, although its process may still live.
            after_error.callback(self._worker.close)
            while left:
                has_worked = False
                for job in list(left):
                    try:
                        is_finished, has_claimed = self._work_on(job)
                        has_worked = has_worked or has_claimed
                    except (LapsedError, GeoError, PredictError) as error:
                        # What a worker does without a claim may fail in many ways.
                        if self._worker.has_lapsed():
                            self._worker.restart()
                            continue
                        if not (skip_broken and isinstance(error, BrokenInputError)):
                            raise
                        self.broken[job.plan.name] = str(error)
                        is_finished = True
                    if is_finished:
                        left.remove(job)
                if left and not has_worked:
                    self._advance()
                    time.sleep(PAUSE_SECONDS)
            after_error.pop_all()

    def _work_on(self, job: MapJob) -> Tuple[bool, bool]:
        """Do what nobody else does for a map; return if it is finished, and if this rank worked."""
        worker, has_claimed = self._worker, False
        while not job.is_finished():
            claims, runs = self._claim_runs(job)
            is_assembly = not claims and not job.missing()
            if is_assembly:
                claim = worker.claim(job.strips.folder, 'assembly')
                claims = [] if claim is None else [claim]
            if not claims:
                return False, has_claimed
            has_claimed = True
            try:
                # Somebody may have finished it just before the claim.
                if job.is_finished():
                    break
                if is_assembly:
                    job.assemble(worker.check)
                else:
                    self._predict(job, [strip for run in runs for strip in job.missing(run)])
            except BrokenInputError:
                for claim in claims:
                    worker.release(claim)
                raise
        job.strips.remove()
        return True, has_claimed

    def _claim_runs(self, job: MapJob) -> Tuple[List[Path], List[Sequence[int]]]:
        """Claim this rank's share of a map: unfinished runs that follow each other, or one."""
        worker = self._worker
        claims: List[Path] = []
        runs: List[Sequence[int]] = []
        # Half of a large map stays free for a later job even without other workers.
        most = -(-len(job.runs) // max(2, worker.worker_count())) if len(job.runs) > 1 else 1
        for run in rotate(job.runs, self._begin):
            claim = None
            if job.missing(run):
                claim = worker.claim(job.strips.folder, f'run{run[0]}-{run[-1]}')
            if claim is not None:
                claims.append(claim)
                runs.append(run)
            if claims and (claim is None or len(claims) >= most):
                break
        return claims, runs

    def _predict(self, job: MapJob, strips: List[int]) -> None:
        start = time.monotonic()
        waits = job.predict(
            strips, self._predictor, self._batch_size, self._advance, self._worker.check
        )
        self.waits.reading += waits.reading
        self.waits.writing += waits.writing
        self.seconds += time.monotonic() - start

    def _advance(self, windows: int = 0) -> None:
        """Count windows that this rank has finished, and show those of all workers."""
        self._worker.windows += windows
        self._progress.reach(self._worker.windows_of_all())


def rotate(items: Sequence[Any], begin: float) -> List[Any]:
    """Return the items from the one at the part ``begin`` of the list, and then those before it."""
    first = int(begin * len(items))
    return [*items[first:], *items[:first]]


def _is_plan(plan: Any) -> bool:
    """Return whether a plan of another job has the form of :meth:`Worker.publish`'s."""
    return (
        isinstance(plan, dict)
        and all(isinstance(plan.get(key), dict) for key in ('settings', 'decisions'))
        and all(isinstance(plan.get(key), list) for key in ('names', 'scenes'))
        and type(plan.get('run_length')) is int
        and plan['run_length'] > 0
        and all(isinstance(scene, dict) and 'name' in scene for scene in plan['scenes'])
    )


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MOST_CHARACTERS else f'{text[:_MOST_CHARACTERS]}...'
