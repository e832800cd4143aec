"""Low-rank adapters on the experts of a transformers model: trained by an optimized model, loaded by plain PEFT."""

from __future__ import annotations

import argparse
import copy
import tempfile
import time

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import hexa_fx

ADAPTERS = LoraConfig(
    r=16,
    lora_alpha=32,
    target_modules=["q_proj", "v_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
)


def model_of(hidden: int, inner: int, layers: int) -> nn.Module:
    """A small Qwen3-MoE with 16 experts."""
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=hidden,
        moe_intermediate_size=inner,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


def losses(model: nn.Module, ids: torch.Tensor, steps: int) -> list[float]:
    """Training on one batch, with adapters alone."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, found = torch.optim.AdamW(trained, lr=2e-3), []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def seconds(model: nn.Module, ids: torch.Tensor, repeats: int) -> float:
    """Forward and backward, the fastest of some."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        taken.append(time.perf_counter() - start)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--inner", type=int, default=32)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()

    plain = model_of(given.hidden, given.inner, given.layers)
    ids = torch.randint(0, 256, (2, given.tokens // 2))
    torch.manual_seed(1)
    original = get_peft_model(copy.deepcopy(plain), ADAPTERS).train()
    adapted = hexa_fx.optimize_(copy.deepcopy(original), ids, hexa_fx.HexaConfig(own_code_when_small=False))

    expected, found = losses(original, ids, 6), losses(adapted, ids, 6)
    print("loss, PEFT alone:", " ".join(f"{loss:.4f}" for loss in expected))
    print("loss, optimized: ", " ".join(f"{loss:.4f}" for loss in found))
    assert found[-1] < found[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=1e-3)

    with tempfile.TemporaryDirectory() as folder:
        adapted.save_pretrained(folder)
        loaded = PeftModel.from_pretrained(copy.deepcopy(plain), folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, adapted.eval()(ids).logits, rtol=1e-3, atol=1e-3)
    print("the adapters were saved, and loaded by plain PEFT: the same logits")

    if given.hidden == parser.get_default("hidden"):
        print(
            "times of the operators themselves, which a CPU leaves to larger layers (try --hidden 512 --inner 256 --tokens 512):"
        )
    for name, model in (("PEFT alone", original), ("optimized", adapted)):
        print(f"forward and backward, {name}: {1e3 * seconds(model.train(), ids, 5):.1f} ms")


if __name__ == "__main__":
    main()
