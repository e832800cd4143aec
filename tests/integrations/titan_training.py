"""torchtitan's own training loop on CPUs, as a script: `titan_training.py STEPS KIND [OVERRIDE]` prints the losses as JSON.

Run in an empty folder, or as several ranks in one each, over which routed experts are shared out: by KIND ``expert`` whole ones,
whose tokens travel by its all-to-all, by ``tensor`` channels of all of them. It asks for an accelerator; stand-ins are given
for what it asks of one, and for FlexAttention, which has no backward on CPUs.
"""

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch._utils

ANSWERS: dict[str, Any] = {
    "current_device": lambda: 0,
    "get_device_name": lambda *_: "cpu",
    "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=2**34, name="cpu"),
    "memory_stats": lambda *_: {},
}


class Accelerator(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ANSWERS.get(name) or getattr(torch.cpu, name, lambda *_, **__: None)


torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda _: Accelerator("cpu")

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.distributed import utils as distributed_utils  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug  # noqa: E402

WORDS = "<unk> <s> </s> the a of to and in is it on".split()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None, **_: Any) -> Any:
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scale)
    return y, types.SimpleNamespace(lse=None)


def write_data() -> None:
    """A tokenizer of few words, and texts of them where torchtitan's test configurations look for them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    Path("tokenizer").mkdir()
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save("tokenizer/tokenizer.json")
    Path("tokenizer/tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    folder = Path("tests/assets/c4_test")
    folder.mkdir(parents=True)
    ids = torch.randint(3, len(WORDS), (200, 40), generator=torch.Generator().manual_seed(0)).tolist()
    lines = [json.dumps({"text": " ".join(WORDS[i] for i in text)}) for text in ids]
    (folder / "data.json").write_text("\n".join(lines))


def main(steps: int, kind: str, *overrides: str) -> None:
    write_data()
    FlexAttention._compiled_flex_attn = staticmethod(attention)
    distributed_utils.set_pg_timeouts = lambda *_, **__: None  # asks for a function that this torch has not got yet
    losses: list[float] = []
    MetricsProcessor.log = lambda self, step, loss, *_, **__: losses.append(float(loss))
    config = qwen3_moe_debug()
    sizes, words = config.model_spec.model, 64  # its own sizes take minutes on a CPU
    sizes.layers = sizes.layers[:1]
    sizes.tok_embeddings.num_embeddings = sizes.lm_head.out_features = words
    config.loss.loss_fn.global_vocab_size = words
    config.hf_assets_path = "tokenizer"
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 32, steps
    config.checkpoint.enable = False
    config.debug.seed = 1
    config.override.imports = list(overrides)
    if (world := int(os.environ["WORLD_SIZE"])) > 1:
        setattr(config.parallelism, f"{kind}_parallel_degree", world)
        config.training.disable_cuda_graphs = True
        config.parallelism.spmd_backend = "partial_dtensor"  # its default wants a later torch than 2.13
    trainer = config.build()
    modules = [m for part in trainer.model_parts for m in part.modules()]
    for module in modules:
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no other
    trainer.train()
    experts = [m for m in modules if "GroupedExperts" in type(m).__name__]
    dispatchers = {type(m.token_dispatcher).__name__ for m in modules if hasattr(m, "token_dispatcher")}
    found = {
        "losses": losses,
        "experts": sorted({type(m).__name__ for m in experts}),
        "held": [list(getattr(m.w1_EFD, "_local_tensor", m.w1_EFD).shape) for m in experts],
        "dispatchers": sorted(dispatchers),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
