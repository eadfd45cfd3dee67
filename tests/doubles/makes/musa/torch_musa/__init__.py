"""A double of Moore Threads' torch_musa: its ``devices='musa'`` is one string.

PyTorch's map of default backends then has the letters m, u, s and a.
"""

import torch
import torch.distributed as dist
from make_double import add_make, make_group

__version__ = '2.7.1.double'
musa = add_make('musa', 'MUSA_VISIBLE_DEVICES')
# MMEngine imports this package by itself, and needs these types then.
musa.BoolTensor, musa.LongTensor = torch.BoolTensor, torch.LongTensor
dist.Backend.register_backend('mccl', make_group('mccl'), devices='musa')
