"""What ``torch.compile`` made of a training, in its log: graphs, graph breaks, recompilations."""
from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

# Steps without a change after which the first line is written, and steps after which it is in any
# case; as many lie at least between two later ones.
_SETTLED, _AT_MOST = 2, 20
_REASONS = 3  # of graph breaks in a line
_REASON_LENGTH = 120  # characters


@dataclass(frozen=True)
class CompileCounts:
    """What ``torch.compile`` did in this process since some moment.

    Attributes:
        graphs: Number of graphs that were compiled.
        breaks: Number of graph breaks.
        recompilations: Number of times that a function was compiled once more, as for another shape
            or for evaluation; None where this torch does not tell.
        reasons: First lines of the reasons of graph breaks, the most frequent one first.
    """

    graphs: int
    breaks: int
    recompilations: Optional[int]
    reasons: Tuple[str, ...] = ()

    def __str__(self) -> str:
        again = 'an unknown number of' if self.recompilations is None else self.recompilations
        return (f'{_count(self.graphs, "graph")}, {_count(self.breaks, "graph break")}, '
                f'{_count(again, "recompilation")}')


class CompileCounter:
    """Counts from when it is made; reads nothing but counters of ``torch._dynamo``.

    Its names are not public, so that each is asked for, and a torch that has others counts less.

    Attributes:
        works: Whether this torch counts at all.
    """

    def __init__(self) -> None:
        found: Any = getattr(_module('torch._dynamo.utils'), 'counters', None)
        self.works = isinstance(found, Mapping)
        self._counters: Mapping[str, Mapping[str, int]] = found if self.works else {}
        self._identities: Optional[List[str]] = None
        self._handler: Any = getattr(_module('torch._dynamo.callback'), 'callback_handler', None)
        register = getattr(self._handler, 'register_start_callback', None)
        if register is not None:
            self._identities = []
            register(self._begins)
        self._before = self._raw()

    def counts(self) -> CompileCounts:
        """Return the counts so far."""
        (graphs, breaks), (graphs_before, breaks_before) = self._raw(), self._before
        new = {reason: number - breaks_before.get(reason, 0) for reason, number in breaks.items()}
        new = {reason: number for reason, number in new.items() if number > 0}
        again: Optional[int] = None
        if self._identities is not None and (self._identities or graphs == graphs_before):
            again = sum(_again(each) for each in self._identities)
        return CompileCounts(
            graphs - graphs_before, sum(new.values()), again,
            tuple(_first_line(reason) for reason in sorted(new, key=lambda each: -new[each])))

    def close(self) -> None:
        """Count no longer."""
        if self._identities is not None and hasattr(self._handler, 'remove_start_callback'):
            self._handler.remove_start_callback(self._begins)

    def _begins(self, about: Any = None) -> None:
        trigger = getattr(getattr(about, 'callback_trigger', None), 'name', None)
        if trigger == 'DYNAMO' and self._identities is not None:
            self._identities.append(str(getattr(about, 'compile_id', '')))

    def _raw(self) -> Tuple[int, Dict[str, int]]:
        return (int(self._counters.get('stats', {}).get('unique_graphs', 0)),
                dict(self._counters.get('graph_break', {})))


@HOOKS.register_module()
class CompileReportHook(Hook):
    """Write one line once the first steps are compiled, when the numbers grow, and at the end.

    ``MapSageRunner`` registers it where the config has ``compile``. The numbers are those of the
    process whose log it is.

    Args:
        what: Text that says what is compiled.
    """

    def __init__(self, what: str = 'the model') -> None:
        self._what = what
        self._counter = CompileCounter()
        self._said: Optional[CompileCounts] = None
        self._last = self._counter.counts()
        self._steps = self._quiet = self._since = 0
        self._ended = False

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        """Say the numbers once they stay, and once they have grown."""
        counts = self._counter.counts()
        self._steps, self._since = self._steps + 1, self._since + 1
        self._quiet = self._quiet + 1 if counts == self._last else 0
        self._last = counts
        if counts == self._said or not self._counter.works:
            return
        first = self._said is None
        if (self._quiet >= _SETTLED and (first or self._since >= _AT_MOST)) \
                or self._since >= _AT_MOST:
            self._say(runner, counts, f'after {_count(self._steps, "step")}')

    def after_run(self, runner: Any) -> None:
        """Say the numbers of the whole training; a test behind it ends here once more."""
        if self._ended:
            return
        self._ended = True
        self._say(runner, self._counter.counts(), 'in the whole training', warns=False)
        self._counter.close()

    def _say(self, runner: Any, counts: CompileCounts, when: str, warns: bool = True) -> None:
        if not self._counter.works:
            runner.logger.info(f'compile: {self._what}; this torch does not count what it does')
            return
        more = warns and self._said is not None and _grown(self._said, counts)
        why = ''
        if counts.reasons:
            shown = '; '.join(counts.reasons[:_REASONS])
            left = len(counts.reasons) - _REASONS
            why = f'. Graph breaks: {shown}' + (f'; and {left} more reasons' if left > 0 else '')
        note = (f', before: {self._said}. Each recompilation costs time; TORCH_LOGS=recompiles '
                f'names the reasons') if more else ''
        runner.logger.log(logging.WARNING if more else logging.INFO,
                          f'compile: {self._what}: {counts} {when}{note}{why}')
        self._said, self._since = counts, 0


def _grown(before: CompileCounts, now: CompileCounts) -> bool:
    return now.breaks > before.breaks or (now.recompilations or 0) > (before.recompilations or 0)


def _again(identity: str) -> bool:
    """Return whether 'frame/time', as dynamo names what it compiles, is not the first time."""
    # A retry after a graph break in the middle has one more part, 'frame/time_attempt'.
    time = identity.rpartition('/')[2].partition('_')[0]
    return time.isdecimal() and int(time) > 0


def _first_line(reason: Any) -> str:
    line = str(reason).strip().partition('\n')[0].strip()
    return line if len(line) <= _REASON_LENGTH else line[:_REASON_LENGTH - 3] + '...'


def _count(number: Any, noun: str) -> str:
    return f'{number} {noun}' + ('' if number == 1 else 's')


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
