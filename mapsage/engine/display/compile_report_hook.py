"""What ``torch.compile`` made of a training, in its log: graphs, graph breaks, recompilations.

The numbers come from counters of ``torch._dynamo``, which are not public and differ between
versions of torch. Each of them may be missing; then less is reported, and never an error raised.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mapsage.distributed.wrappers.rank_batches import Batch
from mapsage.host.runner import HostRunner

# Steps without a change after which the first line is written.
_SETTLED = 2
# Steps after which the first line is written in any case, and least steps between two later lines.
_AT_MOST = 20
# Number of reasons of graph breaks in a line, and their greatest length in characters.
_REASONS, _REASON_LENGTH = 3, 120


@dataclass(frozen=True)
class CompileCounts:
    """What ``torch.compile`` did in this process since some moment.

    Attributes:
        graphs: Number of graphs that were compiled.
        breaks: Number of graph breaks.
        recompilations: Number of times that a function was compiled once more, as for another shape
            or for evaluation; None if this torch does not count it.
        reasons: First lines of the reasons of graph breaks, the most frequent one first.
    """

    graphs: int
    breaks: int
    recompilations: Optional[int]
    reasons: Tuple[str, ...] = ()

    def __str__(self) -> str:
        again = 'an unknown number of' if self.recompilations is None else self.recompilations
        return (
            f'{_count(self.graphs, "graph")}, {_count(self.breaks, "graph break")}, '
            f'{_count(again, "recompilation")}'
        )


class CompileCounter:
    """Counts from its creation on, by reading counters of ``torch._dynamo``.

    Attributes:
        works: Whether this torch counts at all.
    """

    def __init__(self) -> None:
        self._counters: Mapping[str, Mapping[str, int]] = {}
        try:
            from torch._dynamo.utils import counters

            self._counters = counters
            self.works = True
        except ImportError:
            self.works = False
        # 'frame/time' of each compilation; None if this torch has no callbacks for them.
        self._identities: Optional[List[str]] = None
        self._handler: Any = None
        try:
            from torch._dynamo.callback import callback_handler

            callback_handler.register_start_callback(self._on_compilation)
            self._handler, self._identities = callback_handler, []
        except (ImportError, AttributeError):
            pass
        self._before = self._read()

    def counts(self) -> CompileCounts:
        """Return the counts so far."""
        (graphs, breaks), (graphs_before, breaks_before) = self._read(), self._before
        new = {reason: number - breaks_before.get(reason, 0) for reason, number in breaks.items()}
        new = {reason: number for reason, number in new.items() if number > 0}
        recompilations: Optional[int] = None
        if self._identities is not None and (self._identities or graphs == graphs_before):
            recompilations = sum(_is_repeated(identity) for identity in self._identities)
        return CompileCounts(
            graphs - graphs_before,
            sum(new.values()),
            recompilations,
            tuple(_first_line(reason) for reason in sorted(new, key=lambda reason: -new[reason])),
        )

    def close(self) -> None:
        """Stop counting recompilations."""
        if self._handler is not None:
            self._handler.remove_start_callback(self._on_compilation)

    def _on_compilation(self, event: Any = None) -> None:
        try:
            is_dynamo, identity = event.callback_trigger.name == 'DYNAMO', str(event.compile_id)
        except AttributeError:
            # Older versions of torch call back without an event.
            return
        if is_dynamo and self._identities is not None:
            self._identities.append(identity)

    def _read(self) -> Tuple[int, Dict[str, int]]:
        """Return the number of graphs, and the number of graph breaks by reason."""
        return (
            int(self._counters.get('stats', {}).get('unique_graphs', 0)),
            dict(self._counters.get('graph_break', {})),
        )


@HOOKS.register_module()
class CompileReportHook(Hook):
    """Write one line once the first steps are compiled, when the numbers grow, and at the end.

    ``MapSageRunner`` registers it if the config has ``compile``. A process logs its own numbers.

    Args:
        what: Text that says what is compiled.
    """

    def __init__(self, what: str = 'the model') -> None:
        self._what = what
        self._counter = CompileCounter()
        self._logged: Optional[CompileCounts] = None
        self._last = self._counter.counts()
        # Number of steps; since the counts changed; since the last line.
        self._steps = self._unchanged = self._since = 0
        self._ended = False

    def after_train_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Dict[str, Any]] = None,
    ) -> None:
        """Log the numbers once they have settled, and when they have grown."""
        counts = self._counter.counts()
        self._steps, self._since = self._steps + 1, self._since + 1
        self._unchanged = self._unchanged + 1 if counts == self._last else 0
        self._last = counts
        if counts == self._logged or not self._counter.works:
            return
        first = self._logged is None
        if (
            self._unchanged >= _SETTLED and (first or self._since >= _AT_MOST)
        ) or self._since >= _AT_MOST:
            self._log(runner, counts, f'after {_count(self._steps, "step")}')

    def after_run(self, runner: HostRunner) -> None:
        """Log the numbers of the whole training, once; a later test calls this again."""
        if self._ended:
            return
        self._ended = True
        self._log(runner, self._counter.counts(), 'in the whole training', warns=False)
        self._counter.close()

    def _log(
        self, runner: HostRunner, counts: CompileCounts, when: str, warns: bool = True
    ) -> None:
        if not self._counter.works:
            runner.logger.info(f'compile: {self._what}; this torch does not count what it does')
            return
        grown = warns and self._logged is not None and _has_grown(self._logged, counts)
        reasons = ''
        if counts.reasons:
            shown = '; '.join(counts.reasons[:_REASONS])
            left = len(counts.reasons) - _REASONS
            reasons = f'. Graph breaks: {shown}' + (
                f'; and {left} more reasons' if left > 0 else ''
            )
        advice = (
            (
                f', before: {self._logged}. Each recompilation costs time; TORCH_LOGS=recompiles '
                f'names the reasons'
            )
            if grown
            else ''
        )
        runner.logger.log(
            logging.WARNING if grown else logging.INFO,
            f'compile: {self._what}: {counts} {when}{advice}{reasons}',
        )
        self._logged, self._since = counts, 0


def _has_grown(before: CompileCounts, now: CompileCounts) -> bool:
    return now.breaks > before.breaks or (now.recompilations or 0) > (before.recompilations or 0)


def _is_repeated(identity: str) -> bool:
    """Return whether 'frame/time', as dynamo names what it compiles, is not the first time."""
    # A retry after a graph break inside the frame has a suffix: 'frame/time_attempt'.
    time = identity.rpartition('/')[2].partition('_')[0]
    return time.isdecimal() and int(time) > 0


def _first_line(reason: object) -> str:
    line = str(reason).strip().partition('\n')[0].strip()
    return line if len(line) <= _REASON_LENGTH else line[: _REASON_LENGTH - 3] + '...'


def _count(number: Union[int, str], noun: str) -> str:
    return f'{number} {noun}' + ('' if number == 1 else 's')
