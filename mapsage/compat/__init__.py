"""Gaps in the host packages, one file each, closed before anything else is imported."""
from . import mmcv_ops

mmcv_ops.apply()  # before mmengine's runner, which asks whether mmcv has its ops

from . import checkpoint_loading, config_text, loop_resume, quiet_import  # noqa: E402

checkpoint_loading.apply()
config_text.apply()
loop_resume.apply()
quiet_import.apply()
