"""Group-relative policy optimization of a small MoE language model, whose trainer routes tokens as the sampler did.

The reward counts even tokens. Completions are sampled in bfloat16 and trained in float32, so that without a replay some tokens
would go to other experts in training than they went to in sampling.
"""

from __future__ import annotations

import copy
import logging

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import hexa_fx

PROMPTS, GROUP, PROMPT, COMPLETION, VOCABULARY = 4, 6, 5, 8, 64


def small_model() -> nn.Module:
    """A Qwen3-MoE with 8 experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        moe_intermediate_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    return Qwen3MoeForCausalLM(config)


def sampled(model: nn.Module, prompts: Tensor) -> tuple[Tensor, hexa_fx.RoutingLog]:
    """Prompts with completions, and where their tokens went. The last token of each never enters the model."""
    options = {"max_new_tokens": COMPLETION, "min_new_tokens": COMPLETION, "do_sample": True, "pad_token_id": 0}
    with hexa_fx.record_routing(model) as pieces:
        tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    log = pieces.joined(len(prompts))
    ids = [log.select([row]).ids for row in range(len(prompts))]
    return tokens, hexa_fx.RoutingLog.of_sequences(ids, [tokens.shape[1]] * len(tokens), num_experts=log.num_experts)


def log_probabilities(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of every token of the completions."""
    logits = model(tokens).logits[:, PROMPT - 1 : -1].float()
    return logits.log_softmax(-1).gather(2, tokens[:, PROMPT:, None])[..., 0]


def advantages(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards, and how much better than its group each completion is."""
    rewards = (tokens[:, PROMPT:] % 2 == 0).float().mean(1)
    groups = rewards.view(PROMPTS, GROUP)
    scaled = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return rewards, scaled.view(-1)


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    plain, example = small_model(), torch.randint(1, VOCABULARY, (2, 8))
    config = hexa_fx.HexaConfig(own_code_when_small=False)
    trainer = hexa_fx.optimize_(plain, example, config)
    sampler = hexa_fx.optimize_(copy.deepcopy(small_model()).bfloat16().eval(), example, config)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=5e-3)
    first = last = 0.0
    for step in range(8):
        sampler.load_state_dict(trainer.state_dict())
        prompts = torch.randint(1, VOCABULARY, (PROMPTS, PROMPT)).repeat_interleave(GROUP, 0)
        tokens, log = sampled(sampler, prompts)
        rewards, better = advantages(tokens)
        with torch.no_grad():
            with hexa_fx.record_routing(trainer) as own:
                trainer(tokens)
            with hexa_fx.replay_routing(trainer, log):
                before = log_probabilities(trainer, tokens)
        differ = (own.ids.sort(2)[0] != log.ids.sort(2)[0]).any(2)[~log.live].float().mean()
        for _ in range(2):
            optimizer.zero_grad()
            with hexa_fx.replay_routing(trainer, log):
                for rows in torch.arange(len(tokens)).split(8):  # micro-batches
                    ratio = (log_probabilities(trainer, tokens[rows]) - before[rows]).exp()
                    gain = better[rows, None]
                    loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                    (loss * len(rows) / len(tokens)).backward()
            optimizer.step()
        reward = rewards.mean().item()
        first, last = (reward if step < 1 else first), reward
        if step % 3 == 0:
            print(
                f"step {step}: reward {reward:.2f}; the trainer's own router would send {differ:.1%} of the tokens elsewhere"
            )
    assert last > first
    print(f"reward {first:.2f} -> {last:.2f}, on the sampler's routing")


if __name__ == "__main__":
    main()
