"""A double of Ascend's torch_npu: backend ``hccl``, made by the extended API."""

import torch.distributed as dist
from make_double import add_make, make_extended_group

__version__ = '2.13.0.double'
npu = add_make('npu', 'ASCEND_RT_VISIBLE_DEVICES')
dist.Backend.register_backend(
    'hccl', make_extended_group('hccl'), extended_api=True, devices=['npu']
)
# A second backend of the make, which does not become the default.
dist.Backend.register_backend(
    'lccl', make_extended_group('lccl'), extended_api=True, devices=['npu']
)
