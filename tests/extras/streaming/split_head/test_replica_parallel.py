"""The wrapper of head replicas, and the shares that its optimizer trains, on real ranks."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
import torch.distributed as dist
from forked import fork_ranks
from ranks import run_ranks
from support import main_leg
from torch import nn

pytestmark = main_leg


class Segmentor(nn.Module):
    """Has a neck that every rank holds whole, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.neck, self.decode_head = nn.Conv2d(3, 4, 1), nn.Sequential(nn.Conv2d(4, 6, 1))


def counted_in_a_replica(replicas: Any) -> List[float]:
    """Return what the loss of a step is told: valid pixels and ranks of the global batch."""
    from mmengine.model import BaseModel

    from mapsage.distributed.wrappers import OptimWrapper
    from mapsage.extras.streaming.split_head.replica_parallel import HeadReplicas

    class Counting(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.told = nn.Parameter(torch.ones(1)), torch.zeros(0)

        def count_batch(self, data_samples: Any) -> torch.Tensor:
            return torch.tensor([float(sum(data_samples)), 1.0])

        sum_over_ranks = staticmethod(lambda count: count)

        def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
            self.told = self.sum_over_ranks(self.count_batch(data_samples))
            return dict(loss=self.weight.sum())

    model = HeadReplicas(Counting(), replicas)
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=2)
    wrapper.initialize_count_status(model, 0, 2)
    # The ranks of a replica have the same samples.
    model.train_step(dict(inputs=[], data_samples=[3, 4 + replicas.index]), wrapper)
    return model.module.told.tolist()


def use_a_replica() -> Dict[str, Any]:
    from mapsage.accelerator import resolve_accelerator, set_current_accelerator
    from mapsage.distributed.wrappers.optim_wrapper import AmpOptimWrapper
    from mapsage.distributed.wrappers.split_model import whole_model
    from mapsage.extras.streaming.split_head.replica_parallel import HeadReplicas
    from mapsage.extras.streaming.split_head.replicas import make_replicas
    from mapsage.extras.streaming.split_head.tensor_parallel import TensorParallelError
    from mapsage.extras.streaming.split_head.trained_shares import TrainedShares

    dist.init_process_group('gloo', timeout=timedelta(seconds=30))
    set_current_accelerator(resolve_accelerator('cpu'))
    rank, replicas = dist.get_rank(), make_replicas(2, 30)
    told: Dict[str, Any] = dict(
        places=[
            replicas.count,
            replicas.index,
            replicas.position,
            list(replicas.leaders()),
            dist.get_process_group_ranks(replicas.group),
            dist.get_process_group_ranks(replicas.peers),
        ]
    )
    torch.manual_seed(0)
    model = HeadReplicas(Segmentor(), replicas)
    with pytest.raises(TensorParallelError) as caught:
        TrainedShares(
            model.module.decode_head,
            replicas.group,
            torch.optim.LBFGS(model.module.decode_head.parameters()),
        )
    told['optimizer'] = str(caught.value)
    start = {name: value.clone() for name, value in model.module.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shares = TrainedShares(model.module.decode_head, replicas.group, optimizer)
    model.use_shares(shares)
    assert whole_model(nn.Identity()).__enter__() is None
    with whole_model(model), whole_model(model):
        whole = model.module.state_dict()
        told['whole'] = list(whole) == list(start) and all(
            torch.equal(whole[name], value) for name, value in start.items()
        )
    told['split'] = model.module.decode_head is shares.head
    split, held = shares.parameters_of(optimizer)
    told['shapes'] = [tuple(each.shape) for each in split], [tuple(each.shape) for each in held]

    # gradients that say where they come from
    for each in (*split, *held):
        each.grad = torch.full_like(each, float(rank + 1))
    wrapper = AmpOptimWrapper(optimizer=optimizer, dtype='float16')
    model._complete_gradients(wrapper)
    told['means'] = [
        sorted({float(value) for each in parameters for value in each.grad.reshape(-1)})
        for parameters in (split, held)
    ]
    with pytest.raises(TensorParallelError) as caught:
        shares.clip_grad_norm([*split, *held], 1.0, norm_type=1)
    told['norm'] = str(caught.value)
    if rank == 3:  # which reaches its peer by the mean, and the others because all must agree
        split[1].grad[0] = float('inf')
    model._complete_gradients(wrapper)
    told['counts'] = counted_in_a_replica(replicas)
    told['overflow'] = any(not bool(each.grad.isfinite().all()) for each in split)
    dist.barrier()  # rank 0 holds the store that the others may still ask
    return told


def run_scenarios(folder: Path) -> Any:
    import torch.distributed.tensor.parallel  # noqa: F401  (once, and not on every rank)

    import mapsage.distributed.wrappers.optim_wrapper  # noqa: F401
    import mapsage.extras.streaming.split_head.parallel_styles  # noqa: F401

    return fork_ranks(use_a_replica, 4, folder / 'ranks')


def test_two_replicas_of_two_ranks(tmp_path: Path) -> None:
    answers = run_ranks(run_scenarios, 1, tmp_path, tmp_path, timeout=120)[0]
    for rank, told in enumerate(answers):
        index, place = divmod(rank, 2)
        assert told['places'] == [
            2,
            index,
            place,
            [0, 2],
            [2 * index, 2 * index + 1],
            [place, place + 2],
        ]
        assert told['whole'] and told['split']
        assert told['shapes'] == ([(3, 4, 1, 1), (3,)], [(4, 3, 1, 1), (4,)])
        # shares: of ranks 0 and 2, of ranks 1 and 3; what is held whole: of all four
        assert told['means'] == [[2.0 + place], [2.5]]
        assert told['overflow']
        assert told['counts'] == [7 + 8, 2]
        assert 'the optimizer is LBFGS, expected one' in told['optimizer']
        assert 'norm_type=1, expected 2' in told['norm']
