"""Generate with a transformers MoE model, before and after the rewrite: the same tokens.

On a CPU the prompts run on the operators, and the few tokens of each later step in the model's own code, which is faster there.

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
    model, _ = tiny_model(model_type)
    optimized = hexa_fx.optimize(model)  # shares the weights; `optimize_` works in place

    prompts = torch.randint(3, 100, (16, 48))
    optimized(prompts)  # the first call analyses each block
    tokens = []
    for name, candidate in (("original", model), ("optimized", optimized)):
        started = time.perf_counter()
        tokens.append(candidate.generate(prompts, max_new_tokens=12, do_sample=False, pad_token_id=0))
        print(f"{name}: {time.perf_counter() - started:.2f} s, {tokens[-1][0, 48:].tolist()}")
    assert torch.equal(*tokens)
    print("same tokens")
    print(optimized.report)  # what was rewritten, and what the calls ran


if __name__ == "__main__":
    main(*sys.argv[1:])
