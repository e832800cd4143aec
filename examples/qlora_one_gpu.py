"""QLoRA on the experts of a transformers model: 4-bit bases, PEFT's adapters, gradient checkpointing.

On a CPU it trains a tiny model in seconds. On a GPU, with a checkpoint that transformers 5 loads in bf16 into the host's memory:

    python examples/qlora_one_gpu.py --model Qwen/Qwen3-30B-A3B --device cuda --tokens 4096 --steps 100
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import hexa_fx


def tiny() -> nn.Module:
    """A small Qwen3-MoE with 8 experts."""
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        moe_intermediate_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint; a tiny model if it is left out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--format", default="nf4")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16) if given.model else tiny()
    ids = torch.randint(0, model.config.vocab_size, (1, given.tokens))
    adapters = LoraConfig(
        r=given.rank,
        lora_alpha=2 * given.rank,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    # On the host: optimize, add adapters, pack one expert at a time. What is left moves.
    optimized = hexa_fx.optimize_(model, ids[:, :32])
    model = hexa_fx.quantize_experts_(get_peft_model(optimized, adapters), given.format)
    print(f"{len(optimized.report.rewritten)} blocks, each {optimized.report.blocks[0].packed}")
    model, ids = model.to(given.device).train(), ids.to(given.device)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=2e-3), []
    for _ in range(given.steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print("loss:", " ".join(f"{loss:.4f}" for loss in losses))
    if given.device != "cpu":
        print(f"peak: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        size = (Path(folder) / "adapter_model.safetensors").stat().st_size
        print(f"the adapters alone were saved: {size / 2**10:.0f} KiB")
        if given.model:
            return
        # Plain PEFT merges them into the dense weights.
        merged = PeftModel.from_pretrained(tiny(), folder).merge_and_unload()
    print(f"loss of the merged dense model: {merged(input_ids=ids, labels=ids).loss:.4f}, before: {losses[0]:.4f}")


if __name__ == "__main__":
    main()
