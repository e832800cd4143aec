"""Generate with a transformers MoE model, before and after the rewrite: the same tokens.

    python examples/transformers_inference.py [MODEL_TYPE]

The model is built from its config with tiny widths and random weights, so nothing is downloaded. With a real checkpoint only the
first line of `main` changes: ``AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", dtype="bfloat16").cuda()``.
"""

from __future__ import annotations

import sys
import time

import torch

import hexa_fx
from hexa_fx.integrations.tiny_models import tiny_model


def main(model_type: str = "qwen3_moe") -> None:
    model, inputs = tiny_model(model_type)

    optimized = hexa_fx.optimize(model, inputs)  # shares the weights; `optimize_` works in place
    print(optimized.report)

    prompt = inputs["input_ids"][:, :5]
    tokens = []
    for name, candidate in (("original", model), ("optimized", optimized)):
        started = time.perf_counter()
        tokens.append(candidate.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0))
        print(f"{name}: {time.perf_counter() - started:.2f} s, {tokens[-1][0].tolist()}")
    assert torch.equal(*tokens)
    print("same tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
