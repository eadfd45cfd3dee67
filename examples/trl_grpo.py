"""DynamicGRPOTrainer on a tiny model that is made here, without a download.

    torchrun --nproc_per_node 2 examples/trl_grpo.py

A model of two layers learns which of twelve words follows a prompt. Tried with trl 1.16.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, List

import torch
from datasets import Dataset
from dynamic_grpo import DynamicGRPOTrainer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig

WORDS = [f'w{number}' for number in range(12)]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words."""
    vocabulary = {word: number for number, word in enumerate(['<pad>', '<eos>', '<unk>', *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token='<unk>'))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token='<pad>', eos_token='<eos>', unk_token='<unk>'
    )


def tiny_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Return a language model of two layers and 48 channels, with fixed random weights."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            tie_word_embeddings=True,
        )
    )


def prompts() -> Dataset:
    """Return 24 prompts of two words, each with the word that answers it."""
    rows = [
        dict(prompt=f'{WORDS[k % 12]} {WORDS[k * 5 % 12]}', answer=WORDS[k * 7 % 12])
        for k in range(24)
    ]
    return Dataset.from_list(rows)


def accuracy(completions: List[str], answer: List[str], **kwargs: Any) -> List[float]:
    """Return 1 for each completion that holds the right word, and 0 for the others."""
    return [float(word in text.split()) for text, word in zip(completions, answer)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--steps', type=int, default=6)
    parser.add_argument('--output-dir', type=Path, default=Path('work_dirs/trl_grpo'))
    parser.add_argument('--resume', action='store_true')
    args = parser.parse_args()

    tokenizer = tiny_tokenizer()
    config = GRPOConfig(
        output_dir=str(args.output_dir),
        use_cpu=True,
        bf16=False,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=4,
        beta=0.0,
        learning_rate=3e-3,
        lr_scheduler_type='constant',
        gradient_checkpointing=False,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    trainer = DynamicGRPOTrainer(
        model=tiny_model(tokenizer),
        reward_funcs=[accuracy],
        args=config,
        train_dataset=prompts(),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    if trainer.accelerator.is_main_process:
        for row in trainer.state.log_history:
            if 'dynamic_sampling/pass_rate' in row:
                print(
                    f'step {row["step"]}: reward of all drawn '
                    f'{row["dynamic_sampling/reward_of_all_drawn"]:.3f}, pass rate '
                    f'{row["dynamic_sampling/pass_rate"]:.2f}, generated '
                    f'{row["dynamic_sampling/judged"]:.0f}, of the final batch without a spread '
                    f'{row["frac_reward_zero_std"]:.2f}',
                    flush=True,
                )


if __name__ == '__main__':
    main()
