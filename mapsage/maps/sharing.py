"""Share the maps of a folder among all ranks of all jobs: claim, predict, assemble, help the others.

Every rank is a separate worker (`ledger.py`). It goes through all maps until the last is finished.
It claims runs of strips; the worker that finds all strips of a map finished claims the
assembly. Claims lie in the folder of the map's strips and go with it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

from mapsage.geo import GeoError

from .errors import BrokenInputError, PredictError
from .ledger import PAUSE_SECONDS, LapsedError, Worker
from .map_job import MapJob

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


def share(
    jobs: Sequence[MapJob],
    worker: Worker,
    begin: float,
    predict: Callable[[MapJob, List[int]], None],
    wait: Callable[[], None] = lambda: None,
    skip_broken: bool = False,
) -> Dict[str, str]:
    """Work on maps until all of them are finished, by this worker or by others.

    The worker is closed after an error.

    Args:
        jobs: The maps.
        worker: This rank's entry in the ledger.
        begin: Where in the list, and in each map, this worker begins, from 0 to below 1.
        predict: Function that predicts and stores strips of a map.
        wait: Function that is called while only others work.
        skip_broken: Whether maps whose input is broken are left out.

    Returns:
        Name of a map whose input is broken -> reason.

    Raises:
        GeoError, PredictError: If a map cannot be made.
    """
    try:
        return _share(jobs, worker, begin, predict, wait, skip_broken)
    except BaseException:
        # Others take over what this worker has claimed, although its process may still live.
        worker.close()
        raise


def _share(
    jobs: Sequence[MapJob],
    worker: Worker,
    begin: float,
    predict: Callable[[MapJob, List[int]], None],
    wait: Callable[[], None],
    skip_broken: bool,
) -> Dict[str, str]:
    broken: Dict[str, str] = {}
    left = rotate(jobs, begin)
    while left:
        has_worked = False
        for job in list(left):
            try:
                is_finished, has_claimed = _work_on(job, worker, begin, predict)
                has_worked = has_worked or has_claimed
            except (LapsedError, GeoError, PredictError) as error:
                # What a worker does without a claim may fail in many ways.
                if worker.has_lapsed():
                    worker.restart()
                    continue
                if not (skip_broken and isinstance(error, BrokenInputError)):
                    raise
                broken[job.plan.name] = str(error)
                is_finished = True
            if is_finished:
                left.remove(job)
        if left and not has_worked:
            wait()
            time.sleep(PAUSE_SECONDS)
    return broken


def rotate(items: Sequence[Any], begin: float) -> List[Any]:
    """Return the items from the one at the part ``begin`` of the list, and then those before it."""
    first = int(begin * len(items))
    return [*items[first:], *items[:first]]


def _work_on(
    job: MapJob, worker: Worker, begin: float, predict: Callable[[MapJob, List[int]], None]
) -> Tuple[bool, bool]:
    """Do what nobody else does for a map; return whether it is finished, and whether this worked."""
    has_claimed = False
    while not job.is_finished():
        claims, runs = _claim_runs(job, worker, begin)
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
                predict(job, [strip for run in runs for strip in job.missing(run)])
        except BrokenInputError:
            for claim in claims:
                worker.release(claim)
            raise
    job.strips.remove()
    return True, has_claimed


def _claim_runs(
    job: MapJob, worker: Worker, begin: float
) -> Tuple[List[Path], List[Sequence[int]]]:
    """Claim this worker's share of a map: unfinished runs that follow each other, or one."""
    claims: List[Path] = []
    runs: List[Sequence[int]] = []
    # Half of a large map stays free for a later job even without other workers.
    most = -(-len(job.runs) // max(2, worker.worker_count())) if len(job.runs) > 1 else 1
    for run in rotate(job.runs, begin):
        claim = None
        if job.missing(run):
            claim = worker.claim(job.strips.folder, f'run{run[0]}-{run[-1]}')
        if claim is not None:
            claims.append(claim)
            runs.append(run)
        if claims and (claim is None or len(claims) >= most):
            break
    return claims, runs


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
