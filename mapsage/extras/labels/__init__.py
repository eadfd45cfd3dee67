"""Few labels: masks from the predictions of a model, FixMatch, and windows to label next.

`pseudo_masks` and `joined_config` serve `tools/predict.py --pseudo-labels` (`pseudo_labels.py`);
`fixmatch/` and `unlabeled/` train on images without labels; the other modules serve
`tools/suggest_labels.py`. Existing labels are in `known_labels` for both.
"""
