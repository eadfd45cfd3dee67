"""FixMatch: training on labeled and unlabeled images with an averaged teacher.

``fixmatch.py`` has the training step and uses the teacher (``teacher.py``), the strong views
(``strong_view.py``, ``cut_mix.py``, ``feature_views.py``) and the loss of unlabeled images
(``unlabeled_loss.py``). ``FixMatchHook`` connects the step to a run, and the log tells what the
pseudo-labels are (``pseudo_label_report.py``). The data's side is `unlabeled/`.
"""

from .fixmatch_hook import FixMatchHook, SemiSupervisedError

__all__ = ['FixMatchHook', 'SemiSupervisedError']
