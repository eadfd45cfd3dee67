"""Dynamic sampling between ranks: our plan and exchange against a gather of all samples as objects.

    OMP_NUM_THREADS=1 python tools/benchmarks/sampling_exchange.py

Starts its gloo ranks itself. A step has two rounds of 8 tiles a rank, 512x512 with a float32 image
and an int64 mask, of which 60 % are valid; every rank shall have 8. The object gather sends every
tile to every rank in both rounds, as ms-swift's dynamic sampling does, and cuts the rank's slice
out of the pool: which tiles are valid makes no difference to it. Ours tells counts in both rounds
and moves what is missing; little where every rank has 60 %, more where every other rank has 100 %
and 20 %. They take turns on the same tiles; a time is the slowest rank's, the median over
repetitions. Needs 14 GiB for 8 ranks.
"""

from __future__ import annotations

import functools
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from _common import describe_machine  # noqa: E402

from mapsage.distributed import Consensus, open_channel  # noqa: E402
from mapsage.distributed.virtual_ranks import VirtualRanks  # noqa: E402
from mapsage.sampling import DynamicSampler, Traffic, Validity, exchange, plan_exchange  # noqa: E402
from mapsage.sampling.lockstep import OK, compare_round, round_fields  # noqa: E402

REPETITIONS = {2: 5, 4: 5, 8: 3}  # by ranks: the object gather at 8 takes a while
TARGET, ROUNDS, SEED = 8, 2, 0
PASS_RATES = {'even': (0.6, 0.6), 'uneven': (1.0, 0.2)}  # of ranks in turns; 60 % in all
STEPS, WARM_UP = 500, 50
PLANS = [1024, 16384]  # ranks
MIB = 2**20


class Clock:
    """Seconds between laps, by name."""

    def __init__(self) -> None:
        self.seconds: Dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def tiles() -> List[List[Dict[str, Any]]]:
    """Return rounds of tiles. Not zeros: pages nobody wrote cost nothing to read."""
    return [
        [
            dict(image=torch.rand(3, 512, 512), mask=torch.randint(0, 7, (512, 512)))
            for _ in range(TARGET)
        ]
        for _ in range(ROUNDS)
    ]


def mark(rounds: List[List[dict]], rank: int, kind: str) -> None:
    """Say which of this rank's tiles are valid."""
    draw = random.Random(f'{SEED}/{rank}')
    for samples in rounds:
        for sample in samples:
            sample['valid'] = draw.random() < PASS_RATES[kind][rank % 2]


def gather_objects(rounds: List[List[dict]], clock: Clock) -> Tuple[List[dict], None]:
    """Pool every rank's valid tiles on every rank; return this rank's slice."""
    pool: List[dict] = []
    for samples in rounds:
        everything: List[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everything, samples)
        pool += [sample for each in everything for sample in each if sample['valid']]
        clock.lap('object gather')
    begin = dist.get_rank() * TARGET
    return pool[begin : begin + TARGET], None


def plan_and_move(
    consensus: Consensus, ranks: VirtualRanks, rounds: List[List[dict]], clock: Clock
) -> Tuple[List[dict], Any]:
    """Tell counts round by round, then move what is missing; return this rank's batch."""
    valid, counts, traffic = [], [], Traffic()
    for number, samples in enumerate(rounds):
        good = [sample for sample in samples if sample['valid']]
        valid += good
        counts = compare_round(
            consensus,
            ranks,
            None,
            [
                dict(
                    valid=len(valid),
                    judged=len(samples),
                    passed=len(good),
                    not_finite=0,
                    original=TARGET,
                )
            ],
            step=0,
            attempt=number,
            status=OK,
        ).valid
        clock.lap('counts')
    plan = plan_exchange(counts, TARGET)
    clock.lap('plan')
    batch = exchange(valid, plan, consensus.channel, traffic=traffic)
    clock.lap('exchange')
    return batch, (len(plan.moves), traffic.sent_bytes + traffic.header_bytes)


def measured(way: Callable[..., Any], rounds: List[List[dict]]) -> Tuple[Dict[str, float], Any]:
    """Return the slowest rank's seconds in all and by part, and what the way told next to them."""
    dist.barrier()
    clock, start = Clock(), time.perf_counter()
    batch, told = way(rounds, clock)
    clock.seconds['all'] = time.perf_counter() - start
    assert len(batch) == TARGET and all(sample['valid'] for sample in batch)
    names = sorted(clock.seconds)
    slowest = torch.tensor([clock.seconds[name] for name in names], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(names, slowest.tolist())), told


def compare_ways() -> List[Dict[str, Any]]:
    """Let both ways take turns on this rank's tiles; return a row of figures for each kind."""
    world, rank, rounds = dist.get_world_size(), dist.get_rank(), tiles()
    ranks = VirtualRanks(dist.get_world_size(), dist.get_world_size())
    consensus = Consensus(round_fields(ranks), purpose='sampling')
    move = functools.partial(plan_and_move, consensus, ranks)
    turns: Dict[str, List[Any]] = {'gather': [], 'even': [], 'uneven': []}
    for _ in range(REPETITIONS[world]):
        for name, each in turns.items():
            mark(rounds, rank, 'even' if name == 'gather' else name)
            each.append(measured(gather_objects if name == 'gather' else move, rounds))
    tile = sum(
        array.numel() * array.element_size()
        for array in (rounds[0][0]['image'], rounds[0][0]['mask'])
    )
    rows = []
    for kind in PASS_RATES:
        moves, sent = turns[kind][0][1]
        total = torch.tensor(sent)
        dist.all_reduce(total)
        parts = {
            part: statistics.median(seconds[part] for seconds, _ in turns[kind])
            for part in turns[kind][0][0]
        }
        rows.append(
            dict(
                parts,
                kind=kind,
                moves=moves,
                moved=int(total) / MIB,
                bound=moves * tile / MIB,
                gather=statistics.median(seconds['all'] for seconds, _ in turns['gather']),
                gathered=world * (world - 1) * ROUNDS * TARGET * tile / MIB,
            )
        )
    return rows


def median_ms(action: Callable[[], Any]) -> float:
    """Return the median milliseconds of what the ranks do in step."""
    times = []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[WARM_UP:])


def valid_steps() -> DynamicSampler:
    """Return a sampler to whom nothing is slow and everything is valid."""
    batch = [dict(x=torch.ones(2)) for _ in range(TARGET)]
    return DynamicSampler(
        lambda wanted: batch,
        lambda samples: [1.0] * len(samples),
        Validity(low=0.5),
        TARGET,
        channel=open_channel(None, None, 'sampling'),
    )


def time_valid_steps() -> Dict[str, float]:
    """Time steps in which all samples are valid, and the talk in them by itself."""
    sampler, channel = valid_steps(), open_channel(None, None, 'sampling')
    report = torch.zeros(8, dtype=torch.int64)
    answers = [torch.zeros_like(report) for _ in channel.ranks]
    store = dist.distributed_c10d._get_default_store()
    return {
        'a step': median_ms(sampler.sample),
        'Channel.gather of its 64 bytes': median_ms(lambda: channel.gather(report)),
        'all_gather of 64 bytes': median_ms(lambda: dist.all_gather(answers, report)),
        'add to the store': median_ms(lambda: store.add('benchmark', 1)),
    }


def be_rank(rank: int, world: int, port: int, job: str, answer: str) -> None:
    """Be one rank of a job; the first writes what it returned."""
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group('gloo', rank=rank, world_size=world, timeout=timedelta(seconds=600))
    told = {'ways': compare_ways, 'steps': time_valid_steps}[job]()
    if not rank:
        torch.save(told, answer)
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(job: str, world: int) -> Any:
    """Return what the first rank of a job told."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        answer = str(Path(folder) / 'answer')
        mp.spawn(be_rank, (world, port, job, answer), nprocs=world)
        return torch.load(answer)


def print_plans() -> None:
    print(
        f'\n{"ranks":>6} {"plan ms":>8} {"moves":>7}   (two rounds of 16 samples a rank, 60 % '
        f'valid, target 16, median of 5)'
    )
    draw = random.Random(SEED)
    for world in PLANS:
        counts = [sum(draw.random() < 0.6 for _ in range(32)) for _ in range(world)]
        times = []
        for _ in range(5):
            start = time.perf_counter()
            plan = plan_exchange(counts, 16)
            times.append(time.perf_counter() - start)
        print(f'{world:6} {1000 * statistics.median(times):8.1f} {len(plan.moves):7}', flush=True)


def print_steps() -> None:
    print(f'\nall samples valid, 8 a rank, fetch and score trivial: median of {STEPS}, ms')
    for what, median in dict(
        on_ranks('steps', 2), **{'a step on one rank': median_ms(valid_steps().sample)}
    ).items():
        print(f'{what:<32} {median:6.3f}', flush=True)


def print_ways() -> None:
    print(f'\n{"":14} {"object gather":>15}  {"plan and exchange":^44} {"":>6}  {"at least":>13}')
    print(
        f'{"ranks":>5} {"valid":>8} {"s":>7} {"MiB":>7}  {"s":>7} {"counts":>8} {"plan":>8} '
        f'{"exchange":>9} {"MiB":>8} {"ratio":>6}  {"moves":>5} {"MiB":>7}'
    )
    for world in REPETITIONS:
        for row in on_ranks('ways', world):
            print(
                f'{world:5} {row["kind"]:>8} {row["gather"]:7.2f} {row["gathered"]:7.0f}  '
                f'{row["all"]:7.3f} {row["counts"]:8.4f} {row["plan"]:8.5f} '
                f'{row["exchange"]:9.4f} {row["moved"]:8.2f} {row["gather"] / row["all"]:6.0f}  '
                f'{row["moves"]:5} {row["bound"]:7.0f}',
                flush=True,
            )


def main() -> None:
    print(describe_machine())
    print_plans()
    print_steps()
    print_ways()


if __name__ == '__main__':
    main()
