"""mapsage embed: plan, compute and assemble the embeddings of scenes, alone or as one of several ranks.

Every rank runs the same `EmbedRun`. Rank 0 opens the inputs, measures the encoder, fits or reads
the principal components, and sends the plan to all ranks. Each rank computes its strips
(`blending.py`), and one rank writes the files of an embedding when its strips are finished. Strips
on disk, the claim of the files and the report are those of class maps (`mapsage/maps/`).
"""

from __future__ import annotations

import argparse
import functools
import json
import time
import uuid
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple, cast

import numpy as np
import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.model import revert_sync_batchnorm
from torch import nn

from mapsage.base.files import atomic_write, parse_json
from mapsage.base.progress import ProgressLine
from mapsage.commands.checkpoint_model import (
    choose_batch,
    choose_precision,
    choose_window,
    start_accelerator,
)
from mapsage.commands.cli import build_model, read_config
from mapsage.commands.predict import PARTIAL, shard_of
from mapsage.distributed import all_ranks_or_none, local_rank, open_channel
from mapsage.distributed.launcher_notes import note_for_launcher
from mapsage.distributed.wrappers import place_module
from mapsage.geo import stamp
from mapsage.geo.passport import passport_of_checkpoint
from mapsage.maps.assembly import has_transform
from mapsage.maps.description import Classes
from mapsage.maps.inputs import OWN_SIZE, Door, Scene, choose_size, find_inputs
from mapsage.maps.ledger import Worker
from mapsage.maps.map_job import MapJob, MapSetup, ScenePlan
from mapsage.maps.model import find_bands, load_weights, place_settings, settings_of
from mapsage.maps.outputs import Outputs, is_done, remove_outdated, write_report, writing
from mapsage.maps.places import find_places, open_places
from mapsage.maps.predictor import dtype_name
from mapsage.maps.sharing import SharedWork, run_length, shared_plan
from mapsage.maps.strips import StripStore, count_windows, key_of
from mapsage.models.frozen_weights import digest_of, pretrained_source
from mapsage.version import __version__

from .blending import AlignedGrid, CellScene
from .embedding_file import EmbeddingFile, EmbeddingWriter, band_names, write_cog
from .encoder import DEFAULT_LAYER, Encoder
from .errors import EmbeddingError
from .seams import SeamIndex
from .vectors import SCHEME, Pca

# Ranks wait for each other after their strips, which may take unequally long.
_TIMEOUT_SECONDS = 7 * 24 * 3600
# Windows of the sample for principal components, and the most vectors in it.
_SAMPLE_WINDOWS, _SAMPLE_VECTORS = 256, 100_000
_PCA_FILE = 'pca.json'
_SEED = 0
# Seam index from which borders of windows can be seen in a picture.
_VISIBLE_SEAM = 1.05


@dataclass(frozen=True)
class EmbedSetup(MapSetup):
    """Settings that all embeddings of a run have in common; windows and sizes are in cells.

    Attributes:
        stride: Pixels between two vectors of the encoder.
        cell: Side of a cell in pixels that the encoder sees: the stride, or 1.
        margin: Pixels of context on each side of a window.
        facts: Content of the files' tag.
    """

    stride: int = 1
    cell: int = 1
    margin: int = 0
    facts: Mapping[str, Any] = ()  # type: ignore[assignment]

    def outputs_of(self, name: str) -> Outputs:
        """Return the paths of the files of an embedding: ``NAME.tif`` and ``NAME.json``."""
        return Outputs.of(self.folder, name, False, False, False, False, False)


class EmbedJob(MapJob):
    """The work on one embedding on this rank; the scores of its strips are the vectors' bytes."""

    _setup: EmbedSetup

    def __init__(self, plan: ScenePlan, setup: EmbedSetup, run_length: int = 1) -> None:
        super().__init__(plan, setup, run_length)
        size = plan.height, plan.width
        self.grid: AlignedGrid = AlignedGrid(
            *size, setup.window, setup.overlap, step=setup.stride // setup.cell
        )
        self.strips = StripStore(self.strips.folder, self.grid, False, len(setup.classes.names))

    def _open(self, size: Optional[Tuple[int, int]] = None) -> Scene:
        if size is None:
            return super()._open()
        # The plan's size is in cells.
        scene = super()._open(tuple(self.plan.settings['size']))
        return CellScene(scene, self._setup.cell, self._setup.margin)

    def assemble(self, check: Callable[[], None]) -> None:
        """Write the embedding and its report from the strips, and remove them."""
        outputs, setup, grid = self.outputs, self._setup, self.grid
        height, width = self.plan.settings['size']
        # A worker that lost its claim while it slept may still write its own working file.
        working = self.strips.folder / f'embedding-{uuid.uuid4().hex[:8]}.tif'
        seams, known = SeamIndex(grid), 0
        damage: List[str] = []
        with self._open().raster as raster:
            transform = raster.transform * raster.transform.scale(
                raster.width / width * setup.cell, raster.height / height * setup.cell
            )
            writer = EmbeddingWriter(
                working,
                grid.width,
                grid.height,
                len(setup.classes.names),
                raster.crs if raster.is_georeferenced else None,
                transform if has_transform(raster) else None,
                setup.facts,
            )
        with writer:
            for number in range(len(grid.rows)):
                strip = self.strips.read(number)
                assert strip.probabilities is not None
                vectors = strip.probabilities.view(np.int8)
                writer.write(grid.strip(number)[0], vectors)
                seams.add(vectors)
                damage += strip.damage
                known += int(np.count_nonzero(strip.classes))
        check()
        remove_outdated(outputs)
        write_cog(working, outputs.map)
        check()
        write_report(
            outputs.report,
            dict(
                settings=self.plan.settings,
                width=grid.width,
                height=grid.height,
                dims=len(setup.classes.names),
                cells=known,
                no_data=grid.width * grid.height - known,
                seam_index=seams.value(),
                damage=damage,
                files=[outputs.map.name],
            ),
        )
        self.strips.remove()


class EmbedRun:
    """This rank's share of a run of mapsage embed. Creating one and :meth:`run` are collective.

    Args:
        args: Options of the command line.
        say: Function that prints a line; called on rank 0 only.
    """

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._args, self._shard = args, shard_of(args.shard)
        self._cfg = read_config(args)
        self._accelerator = start_accelerator(self._cfg, args.launcher)
        self._channel = open_channel(timeout=_TIMEOUT_SECONDS)
        self._rank, self._world_size = self._channel.rank, len(self._channel.ranks)
        self._say = say if self._rank == 0 else lambda line: None
        shared: Dict[str, Any] = {}
        with self._fail_together('preparing the embeddings'), ExitStack() as stack:
            self._inputs = self._find_inputs()
            if self._rank == 0:
                self._worker = stack.enter_context(Worker(Path(args.out), list(self._inputs)))
            self._load()
            if self._rank == 0:
                with self._worker.exclusive(self._say):
                    shared = self._plan()
            self._entry = stack.pop_all()
        shared = json.loads(self._channel.gather_texts(json.dumps(shared))[0])
        self._setup = self._make_setup(shared)
        self._windows = shared['windows']
        self._jobs = [
            EmbedJob(ScenePlan(**plan), self._setup, shared['run_length'])
            for plan in shared['scenes']
        ]
        for job in self._jobs:
            job.note_input_files()
        if self._rank > 0:
            self._worker = Worker(Path(args.out), job=shared['job'], rank=self._rank)
            self._entry.enter_context(self._worker)

    def _fail_together(self, task: str) -> Any:
        return all_ranks_or_none(task, timeout=_TIMEOUT_SECONDS)

    def _find_inputs(self) -> Dict[str, str]:
        """Return the inputs: name of an embedding -> path."""
        args, settings = self._args, place_settings(self._cfg)
        self._places = None if settings is None else open_places(settings)
        if self._places is None:
            return find_inputs(args.inputs, args.allow_remote)
        unused = {
            '--bands': args.bands,
            '--scale': args.scale,
            '--gsd': args.gsd,
            '--units': args.units,
        }
        return find_places(self._places, args.inputs, unused)

    def _load(self) -> None:
        """Build the encoder on the device of this rank."""
        args, cfg = self._args, self._cfg
        torch.manual_seed(_SEED)
        model = build_model(cfg)
        self._passport: Optional[Dict[str, Any]] = None
        if args.checkpoint is not None:
            meta = load_weights(model, args.checkpoint)
            self._passport, problem = passport_of_checkpoint(meta, args.checkpoint)
            if problem:
                self._say(f'note: {problem}')
        elif isinstance(getattr(model, 'backbone', None), nn.Module):
            self._initialize(model)
        self._amp = choose_precision(cfg, self._accelerator) if args.amp else None
        self._window, _, origin = choose_window(cfg, args.window, 0)
        bands = find_bands(cfg, model) if hasattr(model, 'data_preprocessor') else None
        device = self._accelerator.device(local_rank())
        model = place_module(revert_sync_batchnorm(model), self._accelerator, local_rank())
        self._encoder = Encoder(model, device, args.layer, self._window, 1, self._amp, self._say)
        assert bands is not None
        self._door = Door(self._passport, args.trust_scenes, self._say)
        self._bands = self._door.bands_of(bands, args.units, args.bands)
        self._gsd = self._door.gsd(args.gsd)
        self._batch_size = self._encoder.batch_size = choose_batch(
            args.batch_size, self._window, 1, self._accelerator, self._bands.count
        )
        self._identity = identify(cfg, model, args.layer, self._amp)
        if self._passport is not None:
            self._identity['passport'] = key_of(self._passport)
        self._say(
            f'{len(self._inputs)} input(s); {self._identity["encoder"]}, layer {args.layer}; windows '
            f'of {self._window[1]}x{self._window[0]} pixels ({origin}), {self._batch_size} at a '
            f'time; {self._accelerator.describe()}'
        )

    def _initialize(self, model: nn.Module) -> None:
        """Give the model the weights that its config names, and say so if there are none."""
        logger = MMLogger.get_current_instance()
        level = logger.level
        # MMEngine logs a line for each parameter.
        logger.setLevel('WARNING')
        try:
            cast(Any, model).init_weights()
        finally:
            logger.setLevel(level)
        if pretrained_source(cast(nn.Module, model.backbone)) is None:
            self._say(
                f'warning: neither a checkpoint nor backbone.init_cfg names weights: the weights of '
                f'{type(model.backbone).__name__} are random (seed {_SEED}).'
            )

    def _make_setup(self, shared: Mapping[str, Any]) -> EmbedSetup:
        """Prepare the encoder for what rank 0 has measured, and return the settings of the run."""
        stored, cell, overlap = shared['facts']['pca'], shared['cell'], shared['overlap']
        pca = None if stored is None else Pca.from_dict(stored, 'the plan of rank 0')
        stride, margin = shared['stride'], shared['margin']
        self._encoder.prepare(stride, shared['scores'], pca, cell, margin, overlap)
        dims = self._encoder.scores
        core = tuple((side - 2 * margin) // cell for side in self._window)
        return EmbedSetup(
            folder=Path(self._args.out),
            classes=Classes(tuple(band_names(dims)), np.zeros((dims, 3), np.uint8)),
            bands=self._bands,
            window=cast(Tuple[int, int], core),
            overlap=overlap,
            members=[],
            area=None,
            outlines={},
            confidence=False,
            probabilities=True,
            polygons=False,
            previews=False,
            single_input=len(self._inputs) == 1,
            places=self._places,
            stride=stride,
            cell=cell,
            margin=margin,
            facts=shared['facts'],
        )

    def _open_inputs(self) -> Dict[str, Tuple[Scene, Tuple[int, int]]]:
        """Open every input; return the scene and the size in which the encoder sees it, by name."""
        scenes, broken = {}, []
        for name, path in self._inputs.items():
            try:
                opener = None if self._places is None else self._places.open
                scene = Scene(path, self._bands, None, (), opener)
                size, origin = choose_size(scene, self._bands.resize, self._args.scale, self._gsd)
                self._door.examine(scene, size != scene.size)
                scenes[name] = Scene(path, self._bands, size, (), opener), size
                if origin != OWN_SIZE:
                    self._say(f'the encoder sees {path} in {size[1]}x{size[0]} pixels ({origin})')
                if not has_transform(scene.raster):
                    self._say(f'note: {path} {scene.raster.georeference_gap}')
            except ValueError as error:
                broken.append(str(error))
        if broken:
            raise EmbeddingError(
                f'{len(broken)} of {len(self._inputs)} input(s) cannot be read: {" ".join(broken)}'
            )
        self._door.report()
        return scenes

    def _plan(self) -> Dict[str, Any]:
        """Measure the encoder and plan all embeddings; return the plan as JSON values. Rank 0."""
        args, encoder = self._args, self._encoder
        scenes = self._open_inputs()
        windows = self._sample(scenes)
        first = next(windows, None)
        if first is None:
            raise EmbeddingError(
                f'no pixel of the {len(scenes)} input(s) has data; expected a scene or place with '
                f'data. Check the no-data values of the files and, of places, their dates.'
            )
        encoder.measure(first[None])
        stride = encoder.stride
        cell = 1 if args.upsample else stride
        margin, overlap = choose_overlap(self._window, stride, args.margin, args.overlap)
        pca = None if args.dims is None and args.pca is None else self._choose_pca(first, windows)
        plan = dict(
            stride=stride,
            scores=encoder.scores,
            cell=cell,
            margin=margin,
            overlap=overlap // cell,
            facts=dict(
                identity=dict(self._identity, pca=None if pca is None else pca.key()),
                dequantize=SCHEME,
                unit_length=True,
                pca=None if pca is None else pca.to_dict(),
                mapsage=__version__,
            ),
        )
        setup = self._make_setup(plan)
        start = time.monotonic()
        encoder(first[None])
        seconds = time.monotonic() - start
        shared = self._plan_scenes(scenes, setup, plan, seconds)
        self._worker.publish(shared)
        return dict(plan, **shared, job=self._worker.job)

    def _plan_scenes(
        self,
        scenes: Mapping[str, Tuple[Scene, Tuple[int, int]]],
        setup: EmbedSetup,
        plan: Mapping[str, Any],
        window_seconds: float,
    ) -> Dict[str, Any]:
        """Return what this job shares with others, and tell the user what is left to compute."""
        names = list(scenes)
        required = dict(device=self._accelerator.name, batch_size=self._batch_size)
        common = dict(
            mapsage=__version__,
            identity=plan['facts']['identity'],
            window=list(self._window),
            bands=list(self._bands.chosen or ()),
            **{key: plan[key] for key in ('cell', 'margin', 'overlap')},
        )
        peers = shared_plan(
            self._worker.plans(), names, common, required, bool(self._args.overwrite)
        )
        planned, cells, windows, widest, strips_left = [], 0, 0, 0, 0
        for name, (scene, size) in scenes.items():
            with scene.raster as raster:
                settings = dict(
                    common,
                    input=[stamp(file) for file in raster.files()],
                    size=list(size),
                    **raster.facts(),
                )
            outputs = setup.outputs_of(name)
            inputs = [scene.path, *raster.files()]
            if any(outputs.map.absolute() == Path(path).absolute() for path in inputs):
                raise EmbeddingError(
                    f'the output {outputs.map} would overwrite its input. Choose another --out.'
                )
            if not self._args.overwrite and is_done(outputs, settings):
                self._say(
                    f'{outputs.map} is there, made with the same settings: skipped (--overwrite '
                    f'makes it again)'
                )
                continue
            height, width = (-(-side // setup.cell) for side in size)
            report = outputs.report
            outdated = stamp(str(report)) if report.exists() else None
            job = EmbedJob(
                ScenePlan(name, scene.path, height, width, settings, outdated=outdated), setup
            )
            if not peers:
                job.strips.remove_damaged()
            strips, total = job.missing(), job.grid.strip_count
            if len(strips) < total:
                self._say(
                    f'{scene.path}: continues, {total - len(strips)} of {total} strips are finished'
                )
            planned.append(asdict(job.plan))
            strips_left += len(strips)
            cells += height * width
            windows += count_windows(job.grid, strips)
            widest = max(widest, width)
        if planned:
            dims = len(setup.classes.names)
            rows, minutes = setup.window[0], windows * window_seconds / self._world_size / 60
            self._say(
                f'{cells:,} vectors of {dims} components, one every {setup.cell} pixel(s): '
                f'{cells * dims / 1e6:,.1f} MB before compression; {windows} windows, about '
                f'{minutes:.1f} min by the first one on {self._world_size} rank(s); '
                f'{5 * dims * rows * widest / 1e6:,.0f} MB of memory a rank for the widest scene'
            )
        return dict(
            names=names,
            settings=common,
            decisions=required,
            run_length=peers.get('run_length', run_length(strips_left, self._world_size)),
            scenes=planned,
            windows=windows,
        )

    def _sample(self, scenes: Mapping[str, Tuple[Scene, Tuple[int, int]]]) -> Iterator[np.ndarray]:
        """Yield windows with data from random places of the inputs, always the same ones."""
        random = np.random.RandomState(_SEED)
        side = self._window
        corners = [
            (scene, size, row, column)
            for scene, size in scenes.values()
            for row in range(0, size[0], side[0])
            for column in range(0, size[1], side[1])
        ]
        for number in random.permutation(len(corners)):
            scene, size, row, column = corners[number]
            # The last window ends with the scene.
            row, column = (
                max(0, min(first, length - window))
                for first, length, window in zip((row, column), size, side)
            )
            pixels, valid, _ = CellScene(scene, 1, 0).read(column, row, side)
            if valid.any():
                yield pixels

    def _choose_pca(self, first: np.ndarray, windows: Iterator[np.ndarray]) -> Pca:
        """Return the components that a file names or the folder holds, or fit new ones."""
        args, path = self._args, Path(self._args.out) / _PCA_FILE
        if args.pca is not None:
            pca = read_pca(args.pca, self._identity, args.dims)
        elif path.exists() and not args.overwrite:
            pca = read_pca(str(path), self._identity, args.dims)
            self._say(f'principal components of {path}')
        else:
            chosen = [first, *(window for window, _ in zip(windows, range(_SAMPLE_WINDOWS - 1)))]
            each = max(1, _SAMPLE_VECTORS // len(chosen))
            random, rows = np.random.RandomState(_SEED), []
            for window in chosen:
                vectors = self._encoder.vectors(window[None])[0]
                flat = vectors.reshape(len(vectors), -1).T
                rows.append(flat[random.permutation(len(flat))[:each]])
            sample = np.concatenate(rows)
            text = f'{len(sample):,} vectors of {len(chosen)} random windows, seed {_SEED}'
            pca = Pca.fit(sample, args.dims, text)
        self._say(
            f'{pca.components.shape[1]} principal components of {pca.sample}: '
            f'{100 * pca.explained:.1f} % of the squared length'
        )
        with writing(path):
            text = json.dumps(dict(identity=self._identity, pca=pca.to_dict()))
            atomic_write(path, (text + '\n').encode())
        return pca

    def run(self) -> int:
        """Compute and write the embeddings; return the exit status."""
        with self._entry:
            seconds = self._compute()
            texts = self._channel.gather_texts(str(self._worker.windows))
            if self._rank > 0:
                return 0
            with self._worker.exclusive(self._say):
                self._worker.leave()
            return self._summarize(seconds, sum(map(int, texts)))

    def _compute(self) -> float:
        """Work on the embeddings until all are finished; return the seconds."""
        encoder = self._encoder
        if self._accelerator.device(local_rank()).type == 'cpu':
            encoder.use_threads(torch.get_num_threads())
        with self._fail_together('computing the embeddings'), ProgressLine(
            self._windows, 'embedding', self._say, self._rank == 0
        ) as progress:
            shard, shards = self._shard
            begin = (shard + self._rank / self._world_size) / shards
            work = SharedWork(self._worker, begin, encoder, self._batch_size, progress)
            work.finish(self._jobs)
        return work.seconds

    def _summarize(self, seconds: float, windows: int) -> int:
        """Tell the user about every embedding; return the exit status."""
        is_partial = False
        for name in self._inputs:
            outputs = self._setup.outputs_of(name)
            report = outputs.read_report()
            if report is None:
                raise EmbeddingError(
                    f'{outputs.report} is missing. With several ranks, --out must be on a storage '
                    f'that all of them share.'
                )
            seam = report['seam_index']
            self._say(
                f'{outputs.map}: {report["width"]}x{report["height"]} vectors of {report["dims"]} '
                f'components, {report["no_data"]:,} without data; '
                + ('no seam index' if seam is None else f'seam index {seam:.3f}')
            )
            if seam is not None and seam > _VISIBLE_SEAM:
                self._say('  note: borders of windows show: take a larger --window or --margin')
            for line in report['damage'][:20]:
                self._say(f'  warning: no data, {line}')
            is_partial = is_partial or bool(report['damage'])
            if not report['cells']:
                self._say(f'  warning: {outputs.map.name} has no data anywhere')
        if windows and seconds:
            self._say(f'{windows} windows in {seconds:.1f} s: {windows / seconds:.1f} windows/s')
        if is_partial:
            text = f'partial: damaged parts of the input are no data; status {PARTIAL}'
            self._say(text)
            note_for_launcher(text)
        return PARTIAL if is_partial else 0


def embed(
    args: argparse.Namespace, say: Callable[[str], None] = functools.partial(print, flush=True)
) -> int:
    """Write embeddings as the command line says; return the exit status.

    Args:
        args: Options of mapsage embed.
        say: Function that prints a line; called on rank 0 only.
    """
    return EmbedRun(args, say).run()


def identify(
    cfg: Config, model: nn.Module, layer: str, amp: Optional[torch.dtype]
) -> Dict[str, Any]:
    """Return what the vectors of an encoder are, as JSON values; equal for equal vectors.

    Heads do not count for a layer of the backbone.
    """
    is_backbone = layer.split(':')[0].split('.')[0] == DEFAULT_LAYER
    state = model.state_dict()
    names = [name for name in state if not is_backbone or name.startswith(f'{DEFAULT_LAYER}.')]
    backbone = {
        key: value for key, value in cfg.model.backbone.items() if key not in ('init_cfg', 'frozen')
    }
    settings = settings_of(
        Config(
            dict(
                cfg.to_dict(),
                model=dict(backbone=backbone, data_preprocessor=cfg.model.get('data_preprocessor')),
            )
        )
        if is_backbone
        else cfg
    )
    return dict(
        encoder=type(model.backbone).__name__,
        settings=key_of(dict(settings=settings)),
        weights=digest_of(model, names),
        layer=layer,
        **({} if amp is None else dict(amp=dtype_name(amp))),
    )


def choose_overlap(
    window: Tuple[int, int], stride: int, margin: Optional[int], overlap: Optional[int]
) -> Tuple[int, int]:
    """Return the context of windows and the overlap of their cores in pixels, multiples of stride.

    Args:
        window: Height and width of windows with their context.
        stride: Pixels between two vectors of the encoder.
        margin: Context on each side that the user chose; None for an eighth of a window, and one
            stride or more where a window has four.
        overlap: Overlap that the user chose; None for a quarter of a core, and one stride or more
            where a core has two.

    Raises:
        EmbeddingError: If they leave no core, or are no multiples of the stride.
    """
    side = min(window)
    if margin is None:
        margin = max(side // 8 // stride, int(side >= 4 * stride)) * stride
    core = side - 2 * margin
    if overlap is None:
        overlap = max(core // 4 // stride, int(core >= 2 * stride)) * stride
    if margin < 0 or not 0 <= overlap < core or margin % stride or overlap % stride:
        raise EmbeddingError(
            f'--margin {margin} and --overlap {overlap} with windows of {side} pixels and a stride '
            f'of {stride}: expected multiples of {stride}, a margin of 0 to '
            f'{(side - stride) // 2 // stride * stride}, and an overlap smaller than the {core} '
            f'pixels between the margins.'
        )
    return margin, overlap


def read_pca(path: str, identity: Mapping[str, Any], dims: Optional[int]) -> Pca:
    """Return the principal components in a ``pca.json``, or in an embedding.

    Args:
        path: The file.
        identity: Encoder whose vectors they are for.
        dims: Number of components that the user asked for, or None.

    Raises:
        EmbeddingError: If they are of another encoder or number, or cannot be read.
    """
    if path.endswith('.json'):
        try:
            stored = parse_json(Path(path).read_text(encoding='utf-8'))
        except (OSError, ValueError) as error:
            raise EmbeddingError(f'{path} cannot be read: {error}') from error
    else:
        stored = dict(EmbeddingFile(path).facts)
        stored['identity'] = {
            key: value for key, value in stored.get('identity', {}).items() if key != 'pca'
        }
    if not isinstance(stored, dict) or not isinstance(stored.get('pca'), dict):
        raise EmbeddingError(f'{path} holds no principal components; make it with --dims.')
    if stored.get('identity') != dict(identity):
        theirs = stored.get('identity')
        theirs = theirs if isinstance(theirs, dict) else {}
        different = [key for key in {**identity, **theirs} if identity.get(key) != theirs.get(key)]
        raise EmbeddingError(
            f'{path} has the principal components of another encoder ({", ".join(different)} '
            f'differ). Name the components of this one with --pca, choose another --out, or add '
            f'--overwrite.'
        )
    pca = Pca.from_dict(stored['pca'], path)
    if dims is not None and pca.components.shape[1] != dims:
        raise EmbeddingError(
            f'{path} has {pca.components.shape[1]} components, --dims {dims} was asked for: leave '
            f'out --dims, choose another --out, or add --overwrite.'
        )
    return pca
