"""A run's config and its mistakes: the one room for both. Others import from here alone.

A mistake is an error or a warning at the first moment at which it can be known, with the value, what
was expected and the next step:

1. :func:`check_config` reads the config before anything is built: keys that belong together, settings
   of missing extras and, for ``tools/train.py``, every value (`values.py`). The doctor asks the same
   rules for all of their sentences: :func:`value_mistakes`, :func:`misspelling_note`,
   :func:`missing_trackers`.
2. :func:`explain_config_error` turns an error of a registry, while parts are built, into a sentence.
3. What only a built object tells is asked by the runner where it has built it: trackers, hooks
   (:func:`saving_mistake`, :func:`monitored_mistake`), optimizers (:func:`check_clipping`).

Checks that compare a model with data are no checks of a config, see ``extensions/checks.py``. How a
file is read is in `file.py`, what the log says of it in `report.py`.
"""

from .mistakes import (
    check_clipping,
    check_trackers,
    explain_config_error,
    missing_trackers,
    misspelling_note,
    monitored_mistake,
    optimizer_mistake,
    saving_mistake,
    unknown_arguments,
)
from .values import check_config, checkpoint_obstacle, datasets_in, value_mistakes

__all__ = [
    'check_clipping',
    'check_config',
    'check_trackers',
    'checkpoint_obstacle',
    'datasets_in',
    'explain_config_error',
    'missing_trackers',
    'misspelling_note',
    'monitored_mistake',
    'optimizer_mistake',
    'saving_mistake',
    'unknown_arguments',
    'value_mistakes',
]
