"""A double of Cambricon's torch_mlu: backend ``cncl``, made by the four classic arguments."""

import torch.distributed as dist
from make_double import add_make, make_group

__version__ = '1.29.double'
mlu = add_make('mlu', 'MLU_VISIBLE_DEVICES')
dist.Backend.register_backend('cncl', make_group('cncl'), devices=['mlu'])
