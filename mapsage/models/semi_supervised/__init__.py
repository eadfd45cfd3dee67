"""FixMatch: training on labeled and unlabeled images with an averaged teacher.

``fixmatch.py`` has the training step and uses all other modules: the teacher (``teacher.py``), the
strong views (``strong_view.py``, ``cut_mix.py``, ``feature_views.py``) and the loss of unlabeled
images (``unlabeled_loss.py``). ``FixMatchHook`` connects the step to a run.
"""
