"""A block of DINOv3ViT against the blocks of transformers and timm: time and memory by SDPA's backend.

    OMP_NUM_THREADS=1 python tools/benchmarks/dinov3_attention.py [--arch small] [--sides 512 1024]

Each block gets the tokens that its own backbone gives it, with the same random weights, on the
CPU, batch 1, float32 (--dtype bfloat16 for another). Times are medians of rounds in turns. Memory
is what the process takes at most beyond what it had before its first call, forward and backward,
each in a separate process. --whole takes the backbone in place of a block.
"""

import argparse
import ctypes
import os
import statistics
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import torch  # noqa: E402
from _common import describe_machine  # noqa: E402
from dinov3_backbone import of_timm, of_transformers  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from mapsage.models import DINOv3ViT  # noqa: E402
from mapsage.models.backbones import dinov3_weights as weights  # noqa: E402

Call = Callable[[], Any]
BACKENDS: Dict[str, Optional[SDPBackend]] = {
    'of its own choice': None,
    'flash': SDPBackend.FLASH_ATTENTION,
    'efficient': SDPBackend.EFFICIENT_ATTENTION,
    'math': SDPBackend.MATH,
}


def models_of(name: str) -> Dict[str, Any]:
    """Return the model, its features and its blocks, by library, with equal weights."""
    arch = weights.ARCHS[name]
    ours = DINOv3ViT(name, normalization=None)
    theirs, features = of_transformers(arch, list(ours.out_indices))
    ours.load_state_dict(
        weights.fit(weights.convert(theirs.state_dict()), ours.state_dict(), arch)[0]
    )
    found = {
        'DINOv3ViT': (ours, ours, ours.blocks),
        'transformers': (theirs, features, theirs.model.layer),
    }
    try:
        model, features = of_timm(name, theirs.state_dict(), list(ours.out_indices))
        found['timm'] = model, features, model.blocks
    except (ImportError, KeyError) as error:
        print(f'without timm: {error}')
    return found


def block_call(features: Any, block: nn.Module, x: torch.Tensor) -> Call:
    """Return a call of one block with what it gets from its backbone."""
    taken: List[Any] = []

    def take(_: nn.Module, args: Any, kwargs: Any) -> None:
        taken[:] = [args, kwargs]

    handle = block.register_forward_pre_hook(take, with_kwargs=True)
    with torch.no_grad():
        features(x)
    handle.remove()
    args, kwargs = taken
    tokens = args[0].detach().requires_grad_()
    return lambda: block(tokens, *args[1:], **kwargs)


def forward(call: Call) -> None:
    """Compute without gradients."""
    with torch.no_grad():
        call()


def forward_backward(call: Call) -> None:
    """Compute with gradients."""
    outputs = call()
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    sum(each.float().sum() for each in outputs).backward()


def only(backend: Optional[SDPBackend]) -> Any:
    """Return a context in which attention takes one backend; None leaves the choice to torch."""
    return nullcontext() if backend is None else sdpa_kernel(backend)


def peak_mib(function: Callable[[Call], None], call: Call) -> float:
    """Return the memory, in MiB, that a first call takes at most in a separate process."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not be taken for nothing
        Path('/proc/self/clear_refs').write_text('5')  # the peak begins again
        before = _status('VmRSS')
        function(call)
        os.write(write, str((_status('VmHWM') - before) / 1024).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return float(text)


def _status(key: str) -> int:
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def works(call: Call, backend: Optional[SDPBackend]) -> bool:
    """Return whether torch has a kernel of this backend here."""
    try:
        with only(backend):
            forward(call)
    except RuntimeError as error:
        if 'kernel' not in str(error):
            raise
        return False
    return True


def times_of(
    calls: Dict[str, Call], function: Callable[[Call], None], rounds: int
) -> Dict[str, List[float]]:
    """Return the seconds of processor time of each call, in turns; a first round warms up."""
    taken: Dict[str, List[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.process_time()
            function(call)
            if number:
                taken[name].append(time.process_time() - start)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--arch', default='small', choices=list(weights.ARCHS))
    parser.add_argument('--sides', type=int, nargs='+', default=[512, 1024])
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--dtype', default='float32', choices=('float32', 'bfloat16'))
    parser.add_argument('--backends', nargs='+', default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument('--whole', action='store_true', help='backbone in place of a block')
    args = parser.parse_args()
    torch.manual_seed(0)
    models = models_of(args.arch)
    what = 'backbone' if args.whole else 'first block'
    print(
        f'{describe_machine()}, {torch.get_num_threads()} thread(s)\narch {args.arch}, {what}, '
        f'{args.dtype}, batch 1, processor time, median of {args.rounds} rounds\n\n'
        f'| side | attention | | forward | forward and backward | MiB at most |\n'
        f'|---|---|---|---|---|---|',
        flush=True,
    )
    autocast = torch.autocast('cpu', torch.bfloat16, enabled=args.dtype == 'bfloat16')
    for side in args.sides:
        x = torch.randn(1, 3, side, side)
        calls: Dict[str, Call] = {}
        for name, (_, features, blocks) in models.items():
            calls[name] = partial(features, x) if args.whole else block_call(features, blocks[0], x)
        for label in args.backends:
            backend = BACKENDS[label]
            with only(backend), autocast:
                if not works(calls['DINOv3ViT'], backend):
                    print(f'| {side} | {label} | no kernel on this device | | | |', flush=True)
                    continue
                memory = {name: peak_mib(forward_backward, call) for name, call in calls.items()}
                quick = times_of(calls, forward, args.rounds)
                whole = times_of(calls, forward_backward, args.rounds)
            for name in calls:
                columns = [
                    f'{1000 * statistics.median(each[name]):.0f} ms (x '
                    + f'{_ratio(each[name], each["DINOv3ViT"]):.2f})'
                    for each in (quick, whole)
                ]
                print(
                    f'| {side} | {label} | {name} | {" | ".join(columns)} | {memory[name]:.0f} |',
                    flush=True,
                )


def _ratio(taken: List[float], own: List[float]) -> float:
    return statistics.median(b / a for a, b in zip(own, taken))


if __name__ == '__main__':
    main()
