"""Group-relative policy optimization with TRL's `GRPOTrainer`, whose forward and backward route tokens as sampling did.

As examples/grpo_replay.py, in TRL's loop: a subclass records what `generate` routes, hands it on with the batch, which TRL shuffles
and splits, and replays it while the loss and its gradients are computed. Adapters alone are trained, on packed experts.
"""

from __future__ import annotations

import logging
import tempfile
from contextlib import ExitStack
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

import hexa_fx

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}: pip install trl datasets") from None

WORDS = [str(number) for number in range(62)]


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for every number below 62."""
    words = Tokenizer(models.WordLevel({word: id for id, word in enumerate(["<pad>", "<end>", *WORDS])}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<pad>")


def small_model() -> nn.Module:
    """A Qwen3-MoE with 8 experts, packed in four bits, with adapters on experts and attention."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        moe_intermediate_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = hexa_fx.optimize_(
        Qwen3MoeForCausalLM(config), torch.randint(2, 64, (2, 8)), hexa_fx.HexaConfig(own_code_when_small=False)
    )
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "o_proj"], target_parameters=experts)
    return hexa_fx.quantize_experts_(get_peft_model(model, lora), "nf4")


class ReplayingTrainer(GRPOTrainer):
    """A `GRPOTrainer` for optimized models."""

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        with hexa_fx.record_routing(self.model) as pieces:
            found = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.sampled = pieces.joined(len(prompt_ids))
        return found

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        rows = [self.sampled.select([row]).ids for row in range(len(batch["completion_ids"]))]
        batch["routed_experts"] = pad_sequence(rows, batch_first=True)  # (B, T, layers, k)
        return batch

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with ExitStack() as self.replayed:  # until backward is done, which may compute checkpoints again
            return super().training_step(*args, **kwargs)

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        lengths = (inputs["prompt_mask"].sum(1) + inputs["completion_mask"].sum(1)).tolist()
        rows = [ids[: length - 1] for ids, length in zip(inputs["routed_experts"], lengths, strict=True)]
        log = hexa_fx.RoutingLog.of_sequences(rows, lengths)  # the last token of each never entered the sampler
        self.replayed.enter_context(hexa_fx.replay_routing(model, log))
        return super().compute_loss(model, inputs, *args, **kwargs)


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """How many of a completion's tokens are even."""
    return [sum(id % 2 == 0 for id in ids) / len(ids) for ids in completion_ids]


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    prompts = [" ".join(WORDS[(7 * start + step) % len(WORDS)] for step in range(3 + start % 3)) for start in range(48)]
    with tempfile.TemporaryDirectory() as folder:
        options = GRPOConfig(
            folder,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_generations=4,
            max_completion_length=8,
            max_steps=12,
            learning_rate=3e-2,
            lr_scheduler_type="constant",
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = ReplayingTrainer(
            small_model(), even, options, Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer()
        )
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert last > first, rewards
    print(f"reward {first:.2f} -> {last:.2f}, trained by TRL on the sampler's routing")


if __name__ == "__main__":
    main()
