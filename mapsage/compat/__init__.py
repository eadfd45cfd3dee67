"""Patches for gaps in the host packages, one file each, applied before other imports."""
from . import mmcv_ops

mmcv_ops.apply()  # before mmengine's runner, which checks for mmcv's ops

from . import checkpoint_loading, config_text, loop_resume, quiet_import  # noqa: E402

checkpoint_loading.apply()
config_text.apply()
loop_resume.apply()
quiet_import.apply()
