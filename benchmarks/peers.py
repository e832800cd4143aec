"""Other packages' MoE layers on the benchmark's own parameters. Each maker raises ImportError where its package is missing.

Their interfaces differ by version; whatever an adapter raises becomes a line of the table instead of a row.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

Layer = Callable[[], Tensor]


def sonic(shape: Any, p: Any) -> Layer:
    """SonicMoE, with gate and up side by side as the parameters have them."""
    general = importlib.import_module("sonicmoe").moe_general_routing_inputs
    tokens = p.ids.new_tensor(range(shape.tokens)).repeat_interleave(shape.top_k).int()
    w1, w2 = p.w1.permute(1, 2, 0), p.w2.permute(1, 2, 0)

    def run() -> Tensor:
        ids, gates = p.ids.reshape(-1).int(), p.gates.reshape(-1).float()
        out = general(p.x, gates, tokens, ids, w1, p.b1, w2, p.b2, shape.experts, concat_layout=True)
        return out[0] if isinstance(out, tuple) else out

    return run


def liger(shape: Any, p: Any) -> Layer:
    """Liger's Triton layer."""
    fused = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    return lambda: fused.apply(p.x, p.w1, p.w2, p.ids, p.gates)


def scatter(shape: Any, p: Any) -> Layer:
    """ScatterMoE's gated layer. It takes up before gate, so its values are not those of the others."""
    mlp = importlib.import_module("scattermoe.mlp").GLUMLP(shape.model, shape.inner, shape.experts, shape.top_k, F.silu)
    mlp.experts.weight, mlp.output_experts.weight = p.w1, p.w2
    return lambda: mlp(p.x, p.gates, p.ids)


def megablocks(shape: Any, p: Any) -> Layer:
    """MegaBlocks routes inside its layer, so it cannot take the benchmark's routing."""
    importlib.import_module("megablocks")
    raise NotImplementedError("its layer has a router of its own")


def tutel(shape: Any, p: Any) -> Layer:
    """Tutel routes inside its layer too."""
    importlib.import_module("tutel")
    raise NotImplementedError("its layer has a router of its own")


MAKERS: dict[str, Callable[[Any, Any], Layer]] = {
    "sonic": sonic,
    "liger": liger,
    "scatter": scatter,
    "megablocks": megablocks,
    "tutel": tutel,
}
"""Name in ``--impls`` -> what makes the layer from a shape and its parameters."""
