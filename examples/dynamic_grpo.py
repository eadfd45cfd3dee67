"""TRL's GRPOTrainer with the dynamic sampling of DAPO: it generates until every group has a spread.

The trainer steps in between the rewards and everything that follows from them: padding,
log-probabilities, advantages, metrics and losses stay TRL's own code, on full batches. The page
docs/how-to/trl.md says what it gives and what not. `trl_grpo.py` runs it on a tiny model.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any, Callable, Dict, List, Mapping, NoReturn, Optional, Sequence, Tuple

import torch
from accelerate.utils import gather, gather_object
from trl import GRPOTrainer
from trl.trainer.utils import is_async_callable

from mapsage.sampling import DynamicSampler, SampledBatch, StepStatistics, Validity

# Methods of TRL's trainer that are overridden or called, with their parameters. They are not
# public: a release that changes one is named before a run begins.
LEANS_ON: Mapping[str, Tuple[str, ...]] = {
    '_generate': ('self', 'prompts'),
    '_calculate_rewards': ('self', 'inputs', 'prompts', 'completions', 'completion_ids_list'),
    '_generate_and_score_completions': ('self', 'inputs'),
    '_save_checkpoint': ('self', 'model', 'trial'),
    '_load_optimizer_and_scheduler': ('self', 'checkpoint'),
}
# Losses that divide by the number of live tokens, and losses that are means over completions. TRL's
# other losses are not exact where places of a batch are masked, or nobody has shown that they are.
TOKEN_LOSSES, MEAN_LOSSES = ('dapo',), ('grpo', 'dr_grpo')

# One completion: the columns of `_generate`, its prompt, its rewards and the columns it logs.
Row = Dict[str, Any]
_COLUMNS = ('prompt_ids', 'completion_ids', 'tool_mask', 'completion', 'logprobs')


class TrlChangedError(RuntimeError):
    """TRL's trainer is not the one that this file was written for."""


def check_trl(trainer: type = GRPOTrainer) -> None:
    """Raise TrlChangedError, with the name, if a method that this file leans on has changed."""
    for name, expected in LEANS_ON.items():
        method = getattr(trainer, name, None)
        parameters = () if method is None else tuple(inspect.signature(method).parameters)
        if parameters != expected:
            raise TrlChangedError(
                f'{trainer.__name__}.{name} takes {parameters or "no call: it is gone"}, expected '
                f'{expected}, as in trl 1.16. Install trl==1.16.0, or look at what changed and '
                f'adapt dynamic_grpo.py.'
            )


class DynamicGRPOTrainer(GRPOTrainer):
    """A GRPOTrainer whose batches consist of groups with different rewards.

    Args:
        *args: Arguments of GRPOTrainer.
        max_resample_times: Number of times that a step generates again. Each time it asks for the
            missing groups, divided by the pass rate, up to ``max_refill_rounds`` times the batch.
        max_refill_rounds: Limit of one resample, as a multiple of the batch.
        shortfall: Policy where groups are still missing: ``'mask'``, ``'fallback'``, ``'pad'`` or
            ``'raise'``, see :func:`mapsage.sampling.decide_shortfall`.
        eps: Smallest spread of a valid group's rewards.
        filter_weights: Weight of each reward function in the filter, for example ``[1, 0]`` to
            filter by accuracy where the second function shapes the reward; TRL's ``reward_weights``
            when None.
        timeout: Seconds that a rank may generate and grade longer than another one.
        **kwargs: Arguments of GRPOTrainer.

    Raises:
        TrlChangedError: If TRL is another one.
        ValueError: If a setting of TRL does not go together with dynamic sampling.
    """

    def __init__(
        self,
        *args: Any,
        max_resample_times: int = 3,
        max_refill_rounds: int = 4,
        shortfall: str = 'mask',
        eps: float = 1e-6,
        filter_weights: Optional[Sequence[float]] = None,
        timeout: Optional[float] = None,
        **kwargs: Any,
    ) -> None:
        check_trl()
        super().__init__(*args, **kwargs)
        self._check_settings(shortfall)
        self._target = self.args.per_device_train_batch_size * self.args.steps_per_generation
        weights = self.reward_weights if filter_weights is None else torch.tensor(filter_weights)
        if len(weights) != len(self.reward_funcs):
            raise ValueError(
                f'{len(weights)} filter_weights for {len(self.reward_funcs)} reward '
                f'functions, expected one each.'
            )
        self._filter_weights = weights.float().cpu()
        self.reward_funcs = [self._guard(function) for function in self.reward_funcs]
        self._failure: Optional[Exception] = None
        # Number of groups that all ranks together have drawn beyond TRL's own batches.
        self._refilled = 0
        self._inputs: Sequence[Mapping[str, Any]] = ()
        self._drawn_rewards: List[torch.Tensor] = []
        self._final_rewards: Optional[torch.Tensor] = None
        self._batch: Optional[SampledBatch] = None
        self.sampler = DynamicSampler(
            fetch=self._refill,
            score=self._score,
            validity=Validity(eps=eps),
            local_target=self._target,
            group_size=self.num_generations,
            max_resample_times=max_resample_times,
            max_refill_rounds=max_refill_rounds,
            shortfall=shortfall,
            timeout=timeout,
        )

    def _check_settings(self, shortfall: str) -> None:
        """Raise ValueError if a setting does not go together with dynamic sampling."""

        def refuse(setting: str, reason: str) -> NoReturn:
            raise ValueError(f'DynamicGRPOTrainer with {setting}: {reason}')

        target = self.args.per_device_train_batch_size * self.args.steps_per_generation
        if target % self.num_generations:
            refuse(
                f'{target} completions on each rank and num_generations={self.num_generations}',
                'a group would lie on two ranks. Set per_device_train_batch_size to a multiple '
                'of num_generations.',
            )
        if self.tools or self.environment_factories is not None:
            refuse(
                'tools or environments',
                'their state belongs to the completions of one generation. Leave them out.',
            )
        if self.multi_objective_aggregation != 'sum_then_normalize':
            refuse(
                f'multi_objective_aggregation={self.multi_objective_aggregation!r}',
                "the filter judges the sum of the rewards. Set 'sum_then_normalize'.",
            )
        if getattr(self.train_dataset, '__getitem__', None) is None:
            refuse('an iterable dataset', 'refills draw prompts by their number. Use a Dataset.')
        if shortfall == 'shrink':
            refuse(
                "shortfall='shrink'",
                "TRL needs equal batches on all ranks. Choose 'mask', which has the same gradient.",
            )
        if shortfall != 'mask':
            return
        exact = TOKEN_LOSSES + MEAN_LOSSES
        if self.loss_type not in exact:
            refuse(
                f"shortfall='mask' and loss_type={self.loss_type!r}",
                f'its gradient is not known to be the mean over the valid completions. Choose '
                f"one of {', '.join(exact)}, or shortfall='fallback'.",
            )
        if self.beta and self.loss_type in MEAN_LOSSES:
            refuse(
                f"shortfall='mask', loss_type={self.loss_type!r} and beta={self.beta}",
                'the KL term is a mean over masked places too, and would be too small. Set '
                "beta=0, loss_type='dapo', or shortfall='fallback'.",
            )
        if self.args.entropy_coef or self.use_adaptive_entropy:
            refuse(
                "shortfall='mask' and an entropy bonus",
                'the bonus is a mean over micro-batches'
                ' with different numbers of live tokens. Leave it out, or set '
                "shortfall='fallback'.",
            )

    # --- what TRL calls

    def _generate_and_score_completions(self, inputs: List[Dict[str, Any]]) -> Dict[str, Any]:
        self._inputs = inputs
        output: Dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.model.training and self.loss_type in MEAN_LOSSES and self._batch is not None:
            # A mean over all places becomes the mean over the valid ones.
            output['advantages'] = output['advantages'] * max(self._batch.weights)
        return output

    def _generate(self, prompts: List[Any]) -> Tuple[Any, ...]:
        if not self.model.training:
            return tuple(super()._generate(prompts))
        self._drawn_rewards = []
        batch = self._batch = self.sampler.sample(self._rollout(self._inputs, prompts))
        rows = [
            self._mask(row) if not weight else row
            for row, weight in zip(batch.samples, batch.weights)
        ]
        if not all(batch.weights):
            for row in rows:
                row['tool_mask'] = row['tool_mask'] or [1] * len(row['completion_ids'])
        self._final_rewards = gather(
            torch.stack([row['rewards'] for row in rows]).to(self.accelerator.device)
        )
        for column in rows[0]['extra']:
            self._pending_extra_logs[column] = [row['extra'][column] for row in rows]
        self._report(batch.statistics)
        # The caller pads and logs the prompts of its list, so these must be the final ones.
        prompts[:] = [row['prompt'] for row in rows]
        columns = [
            None if rows[0][name] is None else [row[name] for row in rows] for name in _COLUMNS
        ]
        return (*columns, {}, None, [])

    def _calculate_rewards(self, *args: Any) -> torch.Tensor:
        if self.model.training and self._final_rewards is not None:
            return self._final_rewards
        rewards = super()._calculate_rewards(*args)
        # In an evaluation there is no sampler that would learn of an error.
        self._raise_together()
        return rewards

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = os.path.join(
            self._get_output_dir(trial=trial), f'checkpoint-{self.state.global_step}'
        )
        torch.save(
            dict(sampler=self.sampler.state_dict(), refilled=self._refilled),
            self._state_path(folder),
        )

    def _load_optimizer_and_scheduler(self, checkpoint: Optional[str]) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint and os.path.exists(self._state_path(checkpoint)):
            state = torch.load(self._state_path(checkpoint), weights_only=True)
            self.sampler.load_state_dict(state['sampler'])
            self._refilled = state['refilled']

    # --- what the sampler calls

    def _refill(self, wanted: int) -> List[Row]:
        """Generate for this rank's next prompts of an endless pass over the data.

        TRL gathers tensors of equal shape while it generates and grades. So every rank generates as
        much as the one that lacks most.
        """
        local_groups = torch.tensor(
            [wanted // self.num_generations], device=self.accelerator.device
        )
        groups = int(gather(local_groups).max())
        first = self._refilled + self.accelerator.process_index * groups
        self._refilled += self.accelerator.num_processes * groups
        rows = [
            self._row_of_pass(first + group)
            for group in range(groups)
            for _ in range(self.num_generations)
        ]
        return self._rollout(rows, [row['prompt'] for row in rows])

    def _score(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return the rewards by which groups are judged.

        A completion that no function could grade counts as the mean of its group, so that it makes
        no spread.

        Raises:
            Exception: The error of a reward function of this rank.
        """
        if self._failure is not None:
            # The sampler sends its text to the other ranks, and all of them end.
            raise self._failure
        rewards = torch.stack([row['rewards'] for row in rows])
        total = (rewards * self._filter_weights).nansum(1)
        total = total.masked_fill(rewards.isnan().all(1), torch.nan)
        groups = total.view(-1, self.num_generations)
        return torch.where(groups.isnan(), groups.nanmean(1, keepdim=True), groups).flatten()

    # --- rollouts

    def _rollout(self, inputs: Sequence[Mapping[str, Any]], prompts: List[Any]) -> List[Row]:
        """Generate and grade completions of whole groups; return a row for each. Collective."""
        result = super()._generate(prompts)
        if len(result) != len(_COLUMNS) + 3:
            raise TrlChangedError(
                f'GRPOTrainer._generate returns {len(result)} values, expected '
                f'{len(_COLUMNS) + 3}, as in trl 1.16. Install trl==1.16.0.'
            )
        columns = dict(zip(_COLUMNS, result))
        fields, images = result[len(_COLUMNS) : len(_COLUMNS) + 2]
        if images is not None:
            raise ValueError(
                'DynamicGRPOTrainer: prompts with images were not tried. Use a dataset of texts.'
            )
        graded = [
            dict(
                row,
                **{
                    name: values[index] if isinstance(values, list) else values
                    for name, values in fields.items()
                },
            )
            for index, row in enumerate(inputs)
        ]
        rewards = (
            super()
            ._calculate_rewards(graded, prompts, columns['completion'], columns['completion_ids'])
            .cpu()
        )
        self._drawn_rewards.append(rewards)
        local = rewards.view(-1, len(prompts), rewards.shape[1])[self.accelerator.process_index]
        extra = dict(self._pending_extra_logs)
        self._pending_extra_logs.clear()
        return [
            dict(
                {
                    name: None if column is None else column[index]
                    for name, column in columns.items()
                },
                prompt=prompts[index],
                rewards=local[index].clone(),
                extra={name: values[index] for name, values in extra.items()},
            )
            for index in range(len(prompts))
        ]

    def _mask(self, row: Row) -> Row:
        """Return a repeat that fills a place: TRL leaves its tokens and its rewards out."""
        return dict(
            row,
            tool_mask=[0] * len(row['completion_ids']),
            rewards=torch.full_like(row['rewards'], torch.nan),
        )

    def _guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a reward function that notes its error instead of raising it.

        TRL gathers the rewards of all ranks right after the functions. A rank that raised there, or
        returned what TRL refuses, would leave the others waiting.
        """
        if isinstance(function, torch.nn.Module):
            # A reward model stays a module: TRL calls it in another way.
            return function

        def note(error: Exception, completions: Sequence[Any]) -> List[None]:
            self._failure = error
            return [None] * len(completions)

        if is_async_callable(function):

            @functools.wraps(function)
            async def guarded_async(completions: Sequence[Any], **kwargs: Any) -> Any:
                try:
                    rewards = await function(completions=completions, **kwargs)
                    return _check_rewards(function, rewards, completions)
                # Whatever it is: the sampler raises it again.
                except Exception as error:
                    return note(error, completions)

            return guarded_async

        @functools.wraps(function)
        def guarded(completions: Sequence[Any], **kwargs: Any) -> Any:
            try:
                rewards = function(completions=completions, **kwargs)
                return _check_rewards(function, rewards, completions)
            # Whatever it is: the sampler raises it again.
            except Exception as error:
                return note(error, completions)

        return guarded

    def _raise_together(self) -> None:
        """Raise on all ranks if a reward function has failed on one. Collective.

        Raises:
            RuntimeError: With the text of the error, on the other ranks.
            Exception: The error of a reward function of this rank.
        """
        error = self._failure
        texts = gather_object(['' if error is None else f'{type(error).__name__}: {error}'])
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text:
                raise RuntimeError(f'rank {rank} failed in scoring completions: {text}')

    def _row_of_pass(self, number: int) -> Mapping[str, Any]:
        """Return a row of an endless pass over the data in random order."""
        epoch, position = divmod(number, len(self.train_dataset))
        return self.train_dataset[int(self._order(epoch)[position])]

    @functools.lru_cache(maxsize=2)  # noqa: B019  (the trainer lives as long as the process)
    def _order(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.args.seed + 1 + epoch)
        return torch.randperm(len(self.train_dataset), generator=generator)

    def _state_path(self, folder: str) -> str:
        return os.path.join(folder, f'dynamic_sampling_{self.accelerator.process_index}.pt')

    def _report(self, statistics: StepStatistics) -> None:
        metrics, drawn = self._metrics['train'], torch.cat(self._drawn_rewards)
        # TRL's own `reward` describes the final batch only, and rises with the filter.
        metrics['dynamic_sampling/reward_of_all_drawn'].append(
            float((drawn * self.reward_weights.cpu()).nansum(1).mean())
        )
        for name in ('pass_rate', 'attempts', 'judged', 'missing', 'moved_samples', 'seconds'):
            metrics[f'dynamic_sampling/{name}'].append(float(getattr(statistics, name)))


def _check_rewards(
    function: Callable[..., Any], rewards: Any, completions: Sequence[Any]
) -> List[float]:
    """Return the rewards as numbers, NaN for None.

    Raises:
        ValueError: If there is not one for each completion.
        TypeError: If one is no number.
    """
    numbers = [torch.nan if reward is None else float(reward) for reward in rewards]
    if len(numbers) != len(completions):
        name = getattr(function, '__name__', type(function).__name__)
        raise ValueError(
            f'the reward function {name} returned {len(numbers)} rewards for '
            f'{len(completions)} completions, expected one for each.'
        )
    return numbers
