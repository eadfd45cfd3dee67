"""A training step by MapSage, MMEngine's Runner, Lightning and a plain loop, for `against_peers.py`.

    python tools/benchmarks/_peer_steps.py [--steps 120]

All train the same model on the same tiles in one process. They take turns step by step. The plain
loop and Lightning keep no log, checkpoint or record of the run; the two Runners do.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import torch  # noqa: E402
from _common import write_tiles  # noqa: E402
from mmengine.dataset import pseudo_collate  # noqa: E402
from mmengine.hooks import Hook  # noqa: E402
from mmengine.registry import DATASETS, MODELS, init_default_scope  # noqa: E402
from mmengine.runner import Runner  # noqa: E402
from step_options import overridden, register  # noqa: E402
from step_overhead import make_config  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

CASE, WARM_UP = 'r18-128-2', 20


class Turn:
    """Times the steps of one way, and lets one way work at a time.

    Attributes:
        seconds: Processor time and elapsed time of each step.
    """

    def __init__(self, steps: int) -> None:
        self.starts, self.ready = threading.Event(), threading.Event()
        self.next: Turn = self
        self.seconds: List[Tuple[float, float]] = []
        self._steps = steps
        self._begin = (0.0, 0.0)

    def wait(self) -> None:
        """Wait for the turn."""
        self.ready.set()
        self.starts.wait()
        self.starts.clear()
        self._begin = time.process_time(), time.perf_counter()

    def end_step(self) -> None:
        """Note the time of a step, and let the next way work."""
        ends = time.process_time(), time.perf_counter()
        self.seconds.append((ends[0] - self._begin[0], ends[1] - self._begin[1]))
        self.next.starts.set()
        if len(self.seconds) < self._steps:
            self.wait()


class TurnHook(Hook):
    """Hands over after a step of a Runner."""

    priority = 'LOWEST'

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def before_train_epoch(self, runner: Runner) -> None:
        """Wait for the first turn."""
        self._turn.wait()

    def after_train_iter(self, *args: Any, **kwargs: Any) -> None:
        """End the step."""
        self._turn.end_step()


def train_plainly(cfg: Any, turn: Turn) -> None:
    """Train as twenty lines of PyTorch do."""
    model, loader = MODELS.build(cfg.model).train(), _loader(cfg)
    optimizer = torch.optim.SGD(model.parameters(), **_rates(cfg))
    turn.wait()
    while len(turn.seconds) < cfg.train_cfg.max_iters:
        for batch in loader:
            loss, _ = model.parse_losses(model(**model.data_preprocessor(batch, True), mode='loss'))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            turn.end_step()
            if len(turn.seconds) == cfg.train_cfg.max_iters:
                break


def train_by_lightning(cfg: Any, turn: Turn) -> None:
    """Train with Lightning's Trainer, without a logger, a progress bar or checkpoints."""
    import pytorch_lightning as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.segmentor = MODELS.build(cfg.model)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            data = self.segmentor.data_preprocessor(batch, True)
            loss: torch.Tensor = self.segmentor.parse_losses(self.segmentor(**data, mode='loss'))[0]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), **_rates(cfg))

        def transfer_batch_to_device(self, batch: Any, *args: Any) -> Any:
            return batch

    class Turns(lightning.Callback):
        def on_train_start(self, *args: Any) -> None:
            turn.wait()

        def on_train_batch_end(self, *args: Any) -> None:
            turn.end_step()

    lightning.Trainer(
        accelerator='cpu',
        devices=1,
        max_steps=cfg.train_cfg.max_iters,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Turns()],
    ).fit(Module(), _loader(cfg))


def _loader(cfg: Any) -> DataLoader:
    dataset = DATASETS.build(cfg.train_dataloader.dataset)
    return DataLoader(
        dataset, cfg.train_dataloader.batch_size, shuffle=True, collate_fn=pseudo_collate
    )


def _rates(cfg: Any) -> Dict[str, Any]:
    return {key: value for key, value in cfg.optim_wrapper.optimizer.items() if key != 'type'}


def time_steps(steps: int) -> Dict[str, List[Tuple[float, float]]]:
    """Return processor and elapsed seconds of the steps of each way."""
    init_default_scope('mmseg')
    # This imports MMSegmentation.
    MODELS.get('SegDataPreProcessor')
    hosts = {(registry, name): registry.get(name) for registry, name in overridden()}
    from mapsage.engine import MapSageRunner

    ours = {(registry, name): registry.get(name) for registry, name in hosts}

    def by(runner: Any) -> Callable[[Any, Turn], None]:
        def train(cfg: Any, turn: Turn) -> None:
            built = runner.from_cfg(cfg)
            built.register_hook(TurnHook(turn))
            built.train()

        return train

    ways = {
        'MapSage': by(MapSageRunner),
        "MMEngine's Runner": by(Runner),
        'Lightning': train_by_lightning,
        'plain loop': train_plainly,
    }
    turns = {name: Turn(steps) for name in ways}
    order = list(turns.values())
    for turn, following in zip(order, order[1:] + order[:1]):
        turn.next = following
    threads = []
    with tempfile.TemporaryDirectory() as folder:
        data = write_tiles(Path(folder) / 'data', size=int(CASE.split('-')[1]))
        for number, (name, train) in enumerate(ways.items()):
            # What MapSage registers over: put back for the others.
            register(ours if name == 'MapSage' else hosts)
            cfg = make_config(CASE, data, Path(folder) / f'run_{number}', steps)
            threads.append(threading.Thread(target=train, args=(cfg, turns[name]), daemon=True))
            threads[-1].start()
            while not turns[name].ready.wait(0.1):
                if not threads[-1].is_alive():
                    sys.exit(f'{name} failed before its first step')
        order[0].starts.set()
        for thread in threads:
            thread.join()
    return {name: turn.seconds[WARM_UP:] for name, turn in turns.items()}


def main() -> None:
    """Print the seconds of all steps as JSON, in the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--steps', type=int, default=WARM_UP + 100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(time_steps(args.steps)))


if __name__ == '__main__':
    main()
