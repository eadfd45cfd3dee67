"""Hides the MM packages from processes with this folder in PYTHONPATH: users of TRL lack them."""

import sys


class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split('.')[0] in ('mmengine', 'mmcv', 'mmseg'):
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)


sys.meta_path.insert(0, Hidden)
