"""MMEngine hooks: what happens between two steps of a loop. Importing the package registers them.

Many hooks derive from :class:`MapSageHook` (`base.py`), which adds to MMEngine's hook points what
only MapSageRunner calls. The order in which they run is in each hook's ``priority``.
"""
from .base import MapSageHook
from .before_after_hook import BeforeAfterHook, NoValidationError
from .compile_report_hook import CompileReportHook
from .dynamic_sampling.dynamic_sampling_hook import DynamicSamplingHook
from .dynamic_sampling.model_score import ModelScore
from .dynamic_sampling.sampled_steps import LoaderError
from .dynamic_sampling.scoring import RewardScore
from .feature_sources.feature_source_hook import FeatureSourceHook
from .feature_sources.head_replica_hook import HeadReplicaHook
from .gradients.accumulated_gradients_hook import AccumulatedGradientsHook
from .gradients.non_finite_loss_hook import NonFiniteLossError, NonFiniteLossHook
from .group_rewards.group_reward_tuning import GroupRewardTuning
from .mask_annealing_hook import MaskAnnealingHook
from .preview_hook import PreviewHook
from .progress_hook import ProgressBarHook
from .ranks.accelerator_hook import AcceleratorHook
from .ranks.device_check_hook import DeviceCheckError, DeviceCheckHook
from .ranks.equal_buffers_hook import EqualBuffersHook
from .ranks.nodes_hook import NodesHook
from .ranks.slowest_rank_hook import SlowestRankHook
from .ranks.stop_hook import StopHook
from .reproducibility_hook import ReproducibilityHook
from .run_report_hook import RunReportHook
from .semi_supervised.fixmatch_hook import FixMatchHook, SemiSupervisedError
from .trained_weights_hook import TrainedWeightsHook
from .window_visualization_hook import WindowVisualizationHook

__all__ = [
    'AcceleratorHook', 'AccumulatedGradientsHook', 'BeforeAfterHook', 'CompileReportHook',
    'DeviceCheckError', 'DeviceCheckHook', 'DynamicSamplingHook', 'EqualBuffersHook',
    'FeatureSourceHook', 'FixMatchHook', 'GroupRewardTuning', 'HeadReplicaHook', 'LoaderError',
    'MapSageHook', 'MaskAnnealingHook', 'ModelScore', 'NoValidationError', 'NodesHook',
    'NonFiniteLossError', 'NonFiniteLossHook', 'PreviewHook', 'ProgressBarHook',
    'ReproducibilityHook', 'RewardScore', 'RunReportHook', 'SemiSupervisedError',
    'SlowestRankHook', 'StopHook', 'TrainedWeightsHook', 'WindowVisualizationHook'
]
