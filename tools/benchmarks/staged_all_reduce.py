"""All-reduce of a 25 MiB bucket at 2 ranks: StagedProcessGroup against plain gloo, in turns.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 tools/benchmarks/staged_all_reduce.py

25 MiB is the default bucket of torch's DDP. With torch_xla installed (PJRT_DEVICE=CPU), a bucket
that lies on an XLA device is measured too.
"""
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from _common import describe_machine  # noqa: E402

from mapsage.accelerator import AcceleratorError, resolve_accelerator, set_current_accelerator  # noqa: E402
from mapsage.distributed import StagedProcessGroup  # noqa: E402

MIB = 25
ROUNDS, WARM_UP = 40, 5


def seconds(group, bucket: torch.Tensor) -> float:
    """Time one all-reduce that both ranks enter together."""
    dist.barrier()
    start = time.perf_counter()
    group.allreduce([bucket], dist.AllreduceOptions()).wait()
    return time.perf_counter() - start


def main() -> None:
    rank = int(os.environ['RANK'])
    torch.set_num_threads(1)
    dist.init_process_group('gloo', timeout=timedelta(seconds=120))
    store = dist.distributed_c10d._get_default_store()
    limit = timedelta(seconds=120)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore('plain', store), rank, 2, limit)
    staged = StagedProcessGroup(dist.PrefixStore('staged', store), rank, 2, limit)
    set_current_accelerator(resolve_accelerator('cpu'))
    host = torch.ones(MIB * 2**18)
    cases = {'plain gloo, CPU tensor': (gloo, host), 'staged, CPU tensor': (staged, host)}
    try:
        accelerator = set_current_accelerator(resolve_accelerator('xla'))
        cases['staged, XLA tensor'] = (staged, host.to(accelerator.device()))
    except AcceleratorError as error:
        if rank == 0:
            print(f'no XLA tensor: {error}')
    times = {name: [] for name in cases}
    for _ in range(ROUNDS + WARM_UP):
        for name, (group, bucket) in cases.items():
            times[name].append(seconds(group, bucket))
    if rank == 0:
        print(describe_machine())
        medians = {name: statistics.median(each[WARM_UP:]) for name, each in times.items()}
        base = medians['plain gloo, CPU tensor']
        print(f'{"path":<24} {"ms":>8} {"MiB/s":>8} {"of gloo":>8}')
        for name, median in medians.items():
            print(f'{name:<24} {1000 * median:8.2f} {MIB / median:8.0f} {base / median:8.2f}')
    dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
