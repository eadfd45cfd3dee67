"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        level: ``'problem'`` if a training would not start; ``'note'`` for a fact that may surprise;
            ``'ok'``; or ``'no'`` for something that is absent and not needed.
        text: Description of the fact.
        next_step: Advice; empty if there is nothing to do.
    """

    level: str
    text: str
    next_step: str = ''

    def __str__(self) -> str:
        arrow = f'\n             -> {self.next_step}' if self.next_step else ''
        return f'  {self.level:<8} {self.text}{arrow}'
