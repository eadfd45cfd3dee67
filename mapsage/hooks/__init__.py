"""MMEngine hooks; importing this package registers them."""
from .accelerator_hook import AcceleratorHook
from .device_check_hook import DeviceCheckError, DeviceCheckHook
from .dynamic_sampling_hook import DynamicSamplingHook, RewardScore
from .feature_source_hook import FeatureSourceHook
from .head_replica_hook import HeadReplicaHook
from .model_score import ModelScore
from .non_finite_loss_hook import NonFiniteLossError, NonFiniteLossHook
from .preview_hook import PreviewHook
from .progress_hook import ProgressBarHook
from .sampled_steps import LoaderError

__all__ = [
    'AcceleratorHook', 'DeviceCheckError', 'DeviceCheckHook', 'DynamicSamplingHook',
    'FeatureSourceHook', 'HeadReplicaHook', 'LoaderError', 'ModelScore', 'NonFiniteLossError',
    'NonFiniteLossHook', 'PreviewHook', 'ProgressBarHook', 'RewardScore'
]
