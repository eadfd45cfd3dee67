"""Patches for gaps in the host packages (PyTorch, MMEngine, MMSegmentation), one file each.

``import mapsage`` applies them before it imports anything else of MapSage. Every file says which
gap it closes and when it can be removed. Gaps of a vendor's device stack are closed by the
accelerator, see ``Accelerator.replace_operations``.
"""

from . import mmcv_ops

# Before the next imports, which import mmengine's runner: it checks for mmcv's ops.
mmcv_ops.apply()

from . import (  # noqa: E402
    amx_convolutions,
    checkpoint_contents,
    checkpoint_loading,
    config_text,
    cuda_in_use,
    deterministic_iou,
    deterministic_pooling,
    fork_configs,
    git_hash,
    group_norm_layout,
    label_sizes,
    log_device,
    log_files,
    loop_resume,
    mask_values,
    mlflow_store,
    pinned_samples,
    printable_log,
    quiet_import,
    shipped_configs,
    tta_scores,
)

# Before the next patches, some of which import mmseg's datasets.
quiet_import.apply()
amx_convolutions.apply()
checkpoint_contents.apply()
checkpoint_loading.apply()
config_text.apply()
cuda_in_use.apply()
deterministic_iou.apply()
deterministic_pooling.apply()
fork_configs.apply()
git_hash.apply()
group_norm_layout.apply()
label_sizes.apply()
log_device.apply()
log_files.apply()
loop_resume.apply()
mask_values.apply()
mlflow_store.apply()
pinned_samples.apply()
printable_log.apply()
shipped_configs.apply()
tta_scores.apply()
