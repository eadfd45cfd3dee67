"""The defects that run.py plants: small, easy to make, and bad for a user."""
from __future__ import annotations

import os
from typing import NamedTuple, Tuple


class Mutant(NamedTuple):
    """A defect.

    Attributes:
        name: Short name for ``--only``.
        file: Path of the source, from the root of the repository.
        what: What is wrong, as a line of the table.
        old: Text of the source that is replaced; occurs there exactly once.
        new: Text that takes its place.
        tests: Test files and node ids that should see the defect, as arguments of pytest.
    """

    name: str
    file: str
    what: str
    old: str
    new: str
    tests: Tuple[str, ...]

    @property
    def room(self) -> str:
        """Folder of the source, without ``mapsage``."""
        folder = os.path.dirname(self.file)
        return folder[len('mapsage/'):] if folder.startswith('mapsage/') else folder


MUTANTS = (
    # accelerator
    Mutant('seed', 'mapsage/accelerator/cpu.py',
           'the seed of a run is not applied',
           'torch.default_generator.manual_seed(seed)', 'return',
           ('tests/unit/accelerator/test_accelerator.py',)),
    Mutant('scaler', 'mapsage/accelerator/base.py',
           'bfloat16 trains with a gradient scaler',
           'enabled = (dtype or self.amp_dtype) == torch.float16',
           'enabled = (dtype or self.amp_dtype) != torch.float32',
           ('tests/unit/accelerator/test_accelerator.py',)),
    Mutant('fault_rank', 'mapsage/accelerator/simulator/settings.py',
           'a simulated fault of one rank strikes by the rank on its node',
           "if rank in (None, environ.get('RANK', '0')):",
           "if rank in (None, environ.get('LOCAL_RANK', '0')):",
           ('tests/unit/accelerator/simulator/test_simulator_settings.py',)),
    Mutant('device_context', 'mapsage/accelerator/simulator/device_module.py',
           'a device context does not restore the device that was current',
           'set_device(self._before)', 'set_device(self._index)',
           ('tests/unit/accelerator/simulator/test_simulator.py::test_eight_devices_of_the_vendors_surface',)),

    # distributed
    Mutant('skipped_gather', 'mapsage/distributed/channel.py',
           'a rank with nothing to say skips the second collective of the others',
           'if not longest.item():', 'if not mine:',
           ('tests/distributed/test_agreeing_ranks.py::test_an_exception_reaches_every_rank',)),
    Mutant('consensus_min', 'mapsage/distributed/consensus.py',
           'the smallest of the values that ranks bring is the largest',
           'return min(self.by_rank(field).values(), default=None)',
           'return max(self.by_rank(field).values(), default=None)',
           ('tests/unit/distributed/test_consensus.py',)),
    Mutant('mpi_local_rank', 'mapsage/distributed/launcher.py',
           'under MPI the local rank is the global one',
           "'LOCAL_RANK': got['OMPI_COMM_WORLD_LOCAL_RANK']",
           "'LOCAL_RANK': got['OMPI_COMM_WORLD_RANK']",
           ('tests/unit/distributed/test_launcher.py::test_mpi',)),
    Mutant('missing_bucket', 'mapsage/distributed/staged.py',
           'of several tensors reduced at once only the first is',
           'for tensor in _as_list(tensors)]\n        for work',
           'for tensor in _as_list(tensors)[:1]]\n        for work',
           ('tests/unit/distributed/test_staged.py::test_collective',)),
    Mutant('local_gradient', 'mapsage/distributed/staged.py',
           'a reduced tensor is not copied back to its device',
           'self._complete(lambda: collective(host))\n        _copy_back(tensors, host)',
           'self._complete(lambda: collective(host))',
           ('tests/distributed/test_simulated_cards.py'
            '::test_eight_simulated_cards_train_like_the_cpu',)),
    Mutant('model_parallel_unasked', 'mapsage/distributed/strategy.py',
           'a model that fits one device is split over all of them',
           'if use_model_parallel is None and too_big and device_count > 1:',
           'if use_model_parallel is None and device_count > 1:',
           ('tests/unit/distributed/test_strategy.py',)),
    Mutant('partial_digest', 'mapsage/distributed/weights.py',
           'the digest of a weight covers its first numbers only',
           'host = tensor.detach().cpu().contiguous().reshape(-1)',
           'host = tensor.detach().cpu().contiguous().reshape(-1)[:4]',
           ('tests/unit/distributed/test_weights.py',)),

    # wrappers
    Mutant('model_not_moved', 'mapsage/wrappers/ddp.py',
           'the model stays where it was built',
           '    module = module.to(device)\n', '',
           ('tests/unit/wrappers/test_ddp.py::test_a_model_goes_to_the_device_of_its_rank',)),
    Mutant('whole_backbone', 'mapsage/wrappers/device_map.py',
           'a backbone that adds up its children is cut between them',
           'return kind.__name__ not in _WHOLE_BACKBONES', 'return True',
           ('tests/unit/wrappers/test_device_map.py',)),
    Mutant('gradient_mean', 'mapsage/wrappers/ddp.py',
           'ranks train without averaging their gradients',
           "        super().__init__(module, detect_anomalous_params=detect_anomalous_params, "
           "**kwargs)\n",
           "        super().__init__(module, detect_anomalous_params=detect_anomalous_params, "
           "**kwargs)\n        self.require_backward_grad_sync = False\n",
           ('tests/unit/wrappers/test_ddp.py::test_step_is_that_of_the_mean_gradient',)),

    # sampling
    Mutant('plan_off_by_one', 'mapsage/sampling/plan.py',
           'a rank gives the samples behind those that the plan says',
           'gifts = ((rank, want[rank] + k)', 'gifts = ((rank, want[rank] + k + 1)',
           ('tests/unit/sampling/test_plan.py',)),
    Mutant('validity_edge', 'mapsage/sampling/validity.py',
           'a group whose spread is just the threshold is valid',
           'highest - lowest > self.eps', 'highest - lowest >= self.eps',
           ('tests/unit/sampling/test_validity.py',)),
    Mutant('pool_age', 'mapsage/sampling/pool.py',
           'surplus expires a step early, and nobody counts it',
           'if step - group.found_at <= self.max_age]', 'if step - group.found_at < self.max_age]',
           ('tests/unit/sampling/test_sampler.py',)),
    Mutant('shrunk_weight', 'mapsage/sampling/shortfall.py',
           'a shrunk step weighs each rank alike, whatever samples it has',
           'weights = [count * world / (total * group_size) for count in targets]',
           'weights = [1.0 for count in targets]',
           ('tests/unit/sampling/test_shortfall.py',)),
    Mutant('exchange_row', 'mapsage/sampling/exchange.py',
           'a rank sends the sample at the place where it will lie',
           'samples[move.source_index]', 'samples[move.destination_index]',
           ('tests/distributed/test_sampling_exchange.py'
            '::test_exactly_the_planned_samples_move_bit_equal',)),
    Mutant('packed_view', 'mapsage/sampling/packing.py',
           'a view of a tensor travels as the memory it points to',
           'array.detach().cpu().resolve_conj().contiguous()',
           'array.detach().cpu().resolve_conj()',
           ('tests/unit/sampling/test_packing.py',)),
    Mutant('raise_alone', 'mapsage/sampling/lockstep.py',
           'the rank that failed raises before it tells the others',
           '    found = consensus.tick(**facts)\n',
           '    if error is not None:\n        raise error\n    found = consensus.tick(**facts)\n',
           ('tests/distributed/test_sampling_faults.py::test_an_exception_on_one_rank_reaches_all',
            )),

    # streaming
    Mutant('lost_flush', 'mapsage/features/prefetch.py',
           'a lazy device is not told to run the encoder',
           '            self._flush()\n', '',
           ('tests/unit/features/test_prefetch.py',)),
    Mutant('prefetch_order', 'mapsage/features/prefetch.py',
           'of the items encoded ahead the latest is fetched first',
           'number, future = self._encoded.popleft()', 'number, future = self._encoded.pop()',
           ('tests/unit/features/test_prefetch.py',)),
    Mutant('wire_checksum', 'mapsage/features/wire/link.py',
           'the checksum of what came over a link is not looked at',
           'if found == header.checksum:', 'if header.nbytes == len(payload):',
           ('tests/distributed/test_streaming_faults.py::test_damage_on_the_way',)),
    Mutant('cache_checksum', 'mapsage/features/cache/cached.py',
           'the checksum of a cached item is not looked at',
           'if not self._checked[number]:', 'if self._checked[number]:',
           ('tests/unit/features/cache/test_cached.py::test_any_byte_that_is_wrong_is_found',)),
    Mutant('cache_key', 'mapsage/features/cache/keys.py',
           'the normalization of images is missing in the key of a cache',
           "data_preprocessor=model.get('data_preprocessor') or cfg.get('data_preprocessor')",
           "data_preprocessor=cfg.get('data_preprocessor')",
           ('tests/unit/features/cache/test_keys.py'
            '::test_the_settings_that_decide_features_decide_the_key',)),
    Mutant('shard_offset', 'mapsage/features/cache/shards.py',
           'all samples of a batch get the features of its first',
           'start = places[row][at][1]', 'start = places[0][at][1]',
           ('tests/unit/features/cache/test_cached.py'
            '::test_features_come_back_bit_equal_from_any_shard',)),
    Mutant('leaked_block', 'mapsage/features/remote/item.py',
           'an item that is given up keeps the blocks that are still empty',
           'blocks = list(self._grants) + [block for block, _ in self._pieces]',
           'blocks = [block for block, _ in self._pieces]',
           ('tests/distributed/test_streaming_faults.py'
            '::test_an_item_that_is_given_up_leaves_no_block_behind',)),
    Mutant('generation', 'mapsage/features/remote/blocks.py',
           'a block that is freed keeps its generation',
           '                self._generations[block] += 1\n', '',
           ('tests/unit/features/remote/test_blocks.py',)),
    Mutant('header_fields', 'mapsage/features/wire/header.py',
           'the numbers of a header are read in another order than they are written',
           'dict(zip(_NUMBERS, values[2:]))', 'dict(zip(sorted(_NUMBERS), values[2:]))',
           ('tests/unit/features/wire/test_header.py',)),
    Mutant('credit', 'mapsage/features/remote/item.py',
           'the credit for the rest of an item counts what was granted before',
           'return Credit(offset, span, blocks)',
           'return Credit(offset, self._progress.granted, blocks)',
           ('tests/distributed/test_streaming_transport.py'
            '::test_a_pool_smaller_than_several_items',)),
    Mutant('replica_failure', 'mapsage/features/split_head/replica_facts.py',
           'a replica goes on although one of its ranks failed',
           "failed = facts.min('state') == State.FAILED",
           "failed = facts.max('state') == State.FAILED",
           ('tests/unit/features/split_head/test_replica_facts.py',)),

    # hooks
    Mutant('infinite_loss', 'mapsage/hooks/non_finite_loss_hook.py',
           'an infinite loss passes for a number',
           "math.isfinite(losses['loss'])", "not math.isnan(losses['loss'])",
           ('tests/unit/hooks/test_non_finite_loss_hook.py',)),
    Mutant('preview_axes', 'mapsage/hooks/preview_hook.py',
           'the preview shows rows as columns',
           'transpose(1, 2, 0)', 'transpose(2, 1, 0)',
           ('tests/unit/hooks/test_preview_hook.py',)),
    Mutant('progress', 'mapsage/hooks/progress_hook.py',
           'the bar is one iteration behind',
           'done = runner.iter + 1', 'done = runner.iter',
           ('tests/unit/hooks/test_progress_hook.py',)),

    # engine
    Mutant('resume_skips', 'mapsage/engine/data_order.py',
           'a resumed run leaves out one batch',
           'self._skip_batches = num_samples // self._batch_size',
           'self._skip_batches = num_samples // self._batch_size + 1',
           ('tests/unit/engine/test_data_order.py',)),
    Mutant('data_order', 'mapsage/engine/data_order.py',
           'the augmentation of a sample depends on the number of ranks',
           'position * self._world_size + self._rank', 'position + self._rank',
           ('tests/unit/engine/test_data_order.py',)),
    Mutant('accumulation', 'mapsage/wrappers/optim_wrapper.py',
           'with mixed precision ranks average gradients in each batch of an accumulated step',
           'with _OptimWrapper.optim_context(self, model), \\\n                current_accel',
           'with current_accel',
           ('tests/unit/wrappers/test_optim_wrapper.py'
            '::test_ranks_average_their_gradients_once_a_step',)),
    Mutant('config_check', 'mapsage/commands/config_checks.py',
           'missing training data are a note and no problem',
           "'note' if loader == 'test_dataloader' else 'problem'",
           "'note' if loader != 'val_dataloader' else 'problem'",
           ('tests/unit/commands/test_doctor.py',)),
    Mutant('doctor_status', 'mapsage/commands/doctor.py',
           'the doctor finds problems and exits with 0',
           'return 0 if well else 1', 'return 0',
           ('tests/unit/commands/test_doctor.py',)),

    # models
    Mutant('rope_axes', 'mapsage/models/backbones/rope.py',
           'the rotary positions of DINOv3 take rows for columns',
           'torch.meshgrid(axes[0], axes[1], indexing=',
           'torch.meshgrid(axes[1], axes[0], indexing=',
           ('tests/unit/models/backbones/test_rope.py::test_positions_are_those_of_the_formula',)),
    Mutant('layer_decay', 'mapsage/models/layer_decay.py',
           'the last block of DINOv3 learns as fast as the head',
           'return len(backbone.blocks) - int(block.group(1))',
           'return len(backbone.blocks) - int(block.group(1)) - 1',
           ('tests/unit/models/test_layer_decay.py',)),

    # datasets
    Mutant('zero_label', 'mapsage/datasets/geotiff.py',
           'with reduce_zero_label the label 0 is not ignored',
           '            ignored |= labels == 0\n', '            ignored |= labels < 0\n',
           ('tests/unit/datasets/test_geotiff.py::test_labels_that_begin_at_one',)),
    Mutant('window_axes', 'mapsage/datasets/geotiff.py',
           'a window of a scene is read at its row for its column',
           '            column, row, side, side)\n        image',
           '            row, column, side, side)\n        image',
           ('tests/unit/datasets/test_geotiff.py'
            '::test_windows_cover_the_scene_and_carry_its_pixels',)),
    Mutant('fill_order', 'mapsage/datasets/coco_polygons.py',
           'large polygons are drawn over the small ones in them',
           "-p['area'])", "p['area'])",
           ('tests/unit/datasets/test_coco_polygons.py',)),
    Mutant('last_tile', 'mapsage/datasets/prepare/tiling.py',
           'the last tile of a row reaches beyond the image',
           '[*regular, end]', '[*regular, regular[-1] + stride]',
           ('tests/unit/datasets/prepare/test_tiling.py::test_starts',)),

    # evaluation
    Mutant('metric_ignore_index', 'mapsage/evaluation/confusion_matrix_metric.py',
           'the metric forgets which label is ignored',
           'counts = count_pixels(prediction, truth, classes, self.ignore_index)',
           'counts = count_pixels(prediction, truth, classes)',
           ('tests/unit/evaluation/test_confusion_matrix_metric.py',)),
    Mutant('boundary_width', 'mapsage/evaluation/boundary.py',
           'the boundary of a class is a pixel too narrow for some image sizes',
           'int(round(dilation_ratio * math.hypot(height, width)))',
           'int(dilation_ratio * math.hypot(height, width))',
           ('tests/unit/evaluation/test_boundary.py',)),
    Mutant('fscore', 'mapsage/evaluation/confusion_matrix.py',
           'the F-score weighs precision in place of recall',
           '(beta**2 * truth + predicted)', '(truth + beta**2 * predicted)',
           ('tests/unit/evaluation/test_confusion_matrix.py',)),

    # inference
    Mutant('blend_weights', 'mapsage/inference/windows.py',
           'the weight of a window falls before its edge and rises again',
           '*= rise[::-1]', '*= rise',
           ('tests/unit/inference/test_windows.py',)),
    Mutant('window_edge', 'mapsage/inference/windows.py',
           'windows overlap less than asked for where they do not divide a scene evenly',
           'gaps = -(-last // (window - overlap))', 'gaps = max(1, last // (window - overlap))',
           ('tests/unit/inference/test_windows.py',)),
    Mutant('resumed_strip', 'mapsage/inference/windows.py',
           'a map that is resumed lacks the windows that reach into its first strip',
           'return next(index for index, row in enumerate(self.rows) '
           'if row + self.window[0] > start)',
           'return next(index for index, row in enumerate(self.rows) if row >= start)',
           ('tests/unit/inference/test_blending.py'
            '::test_strips_predicted_apart_are_the_same_bits',)),

    # geo
    Mutant('nodata', 'mapsage/geo/raster.py',
           'a pixel is invalid as soon as one band has no data',
           'present.any(0)', 'present.all(0)',
           ('tests/unit/geo/test_raster.py::test_no_data_in_every_band_is_invalid',)),
    Mutant('border_direction', 'mapsage/geo/outlines.py',
           'two neighbors simplify their common border from different ends',
           'backward = _runs_backward(flat, arc)',
           'backward = np.zeros_like(_runs_backward(flat, arc))',
           ('tests/unit/geo/test_polygons.py::test_neighbors_share_their_simplified_border',)),
    Mutant('pixel_area', 'mapsage/geo/outlines.py',
           'the holes of a polygon count as its area',
           'np.where(outline, of_rings, -of_rings)', 'of_rings',
           ('tests/unit/geo/test_polygons.py::test_shapes_areas_and_crs',)),

    # compat and tools
    Mutant('checkpoint_gap', 'mapsage/compat/__init__.py',
           'checkpoints are loaded by the host, which may run what is in them',
           'checkpoint_loading.apply()\n', '',
           ('tests/unit/compat/test_checkpoint_loading.py',)),
    Mutant('first_failure', 'tools/launch.py',
           'a rank that the launcher ended passes for the one that failed first',
           'if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM]',
           'if failure.exitcode < 0]',
           ('tests/unit/test_launch.py',)),
)
