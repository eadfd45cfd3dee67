"""Patches for gaps in the host packages, one file each, applied before other imports."""
from . import mmcv_ops

mmcv_ops.apply()  # before mmengine's runner, which checks for mmcv's ops

from . import (  # noqa: E402
    checkpoint_contents,
    checkpoint_loading,
    config_text,
    cuda_in_use,
    deterministic_iou,
    deterministic_pooling,
    fork_configs,
    git_hash,
    log_device,
    loop_resume,
    mlflow_store,
    pinned_samples,
    quiet_import,
    tta_scores,
)

checkpoint_contents.apply()
checkpoint_loading.apply()
config_text.apply()
cuda_in_use.apply()
deterministic_iou.apply()
deterministic_pooling.apply()
fork_configs.apply()
git_hash.apply()
log_device.apply()
loop_resume.apply()
mlflow_store.apply()
pinned_samples.apply()
quiet_import.apply()
tta_scores.apply()
