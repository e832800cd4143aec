"""``experts_implementation="hexa"``: equal to the library's own implementations, for every layout its contract knows."""

import math
import types

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5")

import transformers
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

from hexa_fx import patch_transformers
from hexa_fx.integrations import experts as hexa_experts
from hexa_fx.integrations.experts import Gate
from tests.zoo import families
from tests.zoo.compare import operators_run
from tests.zoo.family_table import errors_of

patch_transformers()
E, D, H, T, K = 5, 8, 6, 11, 3


def make_experts(act: str = "silu", gate: object = None, norm: bool = False, **flags: bool) -> nn.Module:
    """An experts module as transformers' own are written, in float64, with biases if the flags say so."""
    flags = {"has_gate": True, "has_bias": False, "is_transposed": False, **flags}

    class Experts(nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()
            self.num_experts, self.alpha, self.limit = E, 1.3, 2.0
            width = 2 * H if flags["has_gate"] else H
            first, second = ((E, D, width), (E, H, D)) if flags["is_transposed"] else ((E, width, D), (E, D, H))
            name = "gate_up_proj" if flags["has_gate"] else "up_proj"
            self.register_parameter(name, nn.Parameter(torch.randn(first)))
            self.down_proj = nn.Parameter(torch.randn(second))
            if flags["has_bias"]:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(E, width)))
                self.down_proj_bias = nn.Parameter(torch.randn(E, D))
            if norm:
                self.post_expert_norm = nn.LayerNorm(D)
            self.act_fn = ACT2FN[act] if isinstance(act, str) else act

        def forward(self, *args: object) -> None:
            raise NotImplementedError

    if gate is not None:
        Experts._apply_gate = gate
    torch.manual_seed(0)
    made = use_experts_implementation(Experts, has_post_expert_norm=norm, **flags)(types.SimpleNamespace())
    return made.double()


def run(module: nn.Module, implementation: str, index: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of x, routing weights and parameters."""
    torch.manual_seed(1)
    module.config._experts_implementation = implementation
    x = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(T, K, dtype=torch.float64, requires_grad=True)
    y = module(x, index, weights * (index < E))
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, weights, *module.parameters()])]


def gpt_oss_gate(self: nn.Module, h: torch.Tensor) -> torch.Tensor:
    gate, up = h[..., ::2].clamp(max=self.limit), h[..., 1::2].clamp(-self.limit, self.limit)
    return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


def clamped_gate(self: nn.Module, h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, dim=-1)
    return self.act_fn(gate.clamp(max=self.limit)) * up


def shifted_gate(self: nn.Module, h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, dim=-1)
    return self.act_fn(gate + self.limit) * up


class Swish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.beta * x)


CASES = {
    "gated": ({}, Gate("silu", "concat")),
    "gelu, biases": ({"act": "gelu", "has_bias": True}, Gate("gelu", "concat")),
    "transposed, biases": ({"is_transposed": True, "has_bias": True}, Gate("silu", "concat")),
    "ungated relu squared": ({"act": "relu2", "has_gate": False}, Gate("relu2", "none")),
    "clamped and interleaved": (
        {"gate": gpt_oss_gate, "is_transposed": True, "has_bias": True},
        Gate("swiglu_oai", "interleaved", (1.3, 2.0)),
    ),
    "a clamped gate": ({"gate": clamped_gate}, Gate("swiglu_limited", "concat", (2.0, math.inf))),
    "a gate of its own": ({"gate": shifted_gate}, None),
    "ungated, unknown": ({"act": "mish", "has_gate": False, "has_bias": True}, None),
    "a learned activation, silu at the start": ({"act": Swish()}, None),
    "norm behind the experts": ({"norm": True, "is_transposed": True}, None),
}
ROUTINGS = ("random", "one expert", "sentinels", "twice the same")


def routing(name: str) -> torch.Tensor:
    torch.manual_seed(2)
    index = torch.randint(0, E - 1, (T, K))  # expert E-1 is empty
    if name == "one expert":
        index[:] = 2
    if name == "sentinels":
        index[::2, 1:] = E
    if name == "twice the same":
        index[:, 1] = index[:, 0]
    return index


@pytest.mark.parametrize("case", CASES)
def test_layouts(case: str) -> None:
    made, expected = CASES[case]
    module = make_experts(**made)
    if not made.get("norm"):
        assert hexa_experts.identify_gate(module) == expected
    for name in ROUTINGS:
        module._is_expert_parallel = name == "sentinels"
        index = routing(name)
        reference, value = run(module, "batched_mm", index), run(module, "hexa", index)
        for a, b in zip(reference, value):
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)


def test_dropout_in_the_activation_is_not_lost_in_train_mode() -> None:
    module = make_experts(act=nn.Sequential(nn.SiLU(), nn.Dropout(0.5)))
    module.config._experts_implementation = "hexa"
    x, weights = torch.randn(T, D, dtype=torch.float64), torch.rand(T, K, dtype=torch.float64)
    index = routing("random")
    plain = module.eval()(x, index, weights)
    torch.testing.assert_close(module(x, index, weights), plain)
    assert not torch.allclose(module.train()(x, index, weights), plain)


def test_no_tokens() -> None:
    module = make_experts()
    module.config._experts_implementation = "hexa"
    empty = torch.zeros(0, D, dtype=torch.float64)
    assert module(empty, torch.zeros(0, K, dtype=torch.int64), torch.zeros(0, K).double()).shape == (0, D)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "aria_text", "phimoe"])
def test_families_equal_eager(family: str) -> None:
    """Logits, loss, router logits and the gradient of every parameter, in float64; 6 of the 18 that were tried by hand."""
    model = families.make(family, dtype=torch.float64)
    batch = families.inputs(3, 5)
    for train in (False, True):
        model.set_experts_implementation("eager")
        reference = families.logits_and_gradients(model, batch, train)
        model.set_experts_implementation("hexa")
        errors = errors_of(reference, families.logits_and_gradients(model, batch, train))
        assert errors.forward <= 1e-12, (train, errors)
        assert errors.gradient <= 1e-12, (train, errors)
    assert operators_run(model.eval(), (), batch) >= families.FAMILIES[family].blocks


@pytest.mark.parametrize("case", ["gated", "norm behind the experts"])
def test_bf16_autocast_and_bf16_weights(case: str) -> None:
    """Under autocast, and with bf16 weights for float32 tokens (a norm in front that computes in float32)."""
    module = make_experts(**CASES[case][0])
    index = routing("random")
    reference = run(module, "hexa", index)[0]
    torch.manual_seed(1)
    x, weights = torch.randn(T, D, dtype=torch.float64).float(), torch.rand(T, K, dtype=torch.float64).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module.float()(x, index, weights)
    y.float().sum().backward()
    z = module.bfloat16()(x, index, weights)
    assert z.dtype == torch.float32
    for value in (y, z):
        assert (value.double() - reference).abs().max() < 0.02 * reference.abs().max()


def test_generate_and_compile_and_export() -> None:
    """Greedy tokens are eager's; the whole model compiles as one graph and exports, which eager does not."""
    model = families.make("gpt_oss", dtype=torch.float64)
    ids = families.inputs(2, 5)["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected, logits = model.generate(ids, **options), model(ids, use_cache=False).logits
    model.set_experts_implementation("hexa")
    exported = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)
    assert sum("moe_ffn" in str(node.target) for node in exported.graph.nodes) == 2
    torch.testing.assert_close(exported.module()(input_ids=ids, use_cache=False).logits, logits)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, logits)
    assert torch.equal(model.generate(ids, **options), expected)


def test_unknown_implementation_is_the_librarys_error_and_patching_repeats() -> None:
    patch_transformers(), patch_transformers()
    assert "hexa" in transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS
    with pytest.raises(ValueError, match="hexa"):
        families.make("mixtral").set_experts_implementation("hexagon")
