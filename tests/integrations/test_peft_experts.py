"""PEFT's adapters on the experts' own parameters: factors reach the operators, and PEFT's way gives the same."""

import copy
import pickle

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx import HexaConfig
from hexa_fx.formats import adapted_weight
from hexa_fx.integrations.tiny_models import built, default_config, tiny_config
from hexa_fx.ir import Small
from tests.integrations.test_transformers import Listed, operators_run
from tests.ops.test_moe_ffn_sources import Launches

peft = pytest.importorskip("peft")
pytest.importorskip("peft.tuners.lora.layer").__dict__.get("ParamWrapper") or pytest.skip("no target_parameters")

CONFIG = HexaConfig(own_code_when_small=False)
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def made(name="qwen3_moe"):
    config = tiny_config(default_config(name))
    config._experts_implementation = "eager"
    model, inputs = built(config, name)
    return model.double(), inputs["input_ids"]


def lora(targets=BOTH, seed=0, **options):
    torch.manual_seed(seed)
    options = {"r": 3, "lora_alpha": 5, "init_lora_weights": False, **options}
    return peft.LoraConfig(target_modules=[], target_parameters=list(targets), **options)


def pair(order, targets=BOTH, name="qwen3_moe", **options):
    """The adapted original, and the same optimized before or after its adapters were added."""
    model, ids = made(name)
    other = copy.deepcopy(model)
    original = peft.get_peft_model(model, lora(targets, **options))
    if order == "adapters first":
        optimized = hexa_fx.optimize_(peft.get_peft_model(other, lora(targets, **options)), ids, CONFIG)
    else:
        optimized = peft.get_peft_model(hexa_fx.optimize_(other, ids, CONFIG), lora(targets, **options))
    return original, optimized, ids


def outcome(model, ids):
    model.zero_grad()
    logits = model(ids).logits
    if logits.requires_grad:
        logits.square().sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(original, optimized, ids):
    expected, found = outcome(original, ids), outcome(optimized, ids)
    torch.testing.assert_close(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-6, atol=1e-8)


def assert_lean(optimized, ids, adapted=True):
    """The operator of factors runs, if adapters are active, and weights are never summed up."""
    parametrized = []
    register = nn.utils.parametrize.register_parametrization
    nn.utils.parametrize.register_parametrization = lambda *args, **kw: (
        parametrized.append(args) or register(*args, **kw)
    )
    try:
        with Launches() as launches:
            optimized(ids)
    finally:
        nn.utils.parametrize.register_parametrization = register
    assert ("hexa::moe_ffn_sources" in " ".join(launches.names_seen())) == adapted
    assert not parametrized
    assert not {"aten::baddbmm", "aten::bmm"} & {
        name for name in launches.names_seen() if launches.size_of(name) > 20000
    }


@pytest.fixture(autouse=True)
def _fresh():
    adapted_weight.say_once.cache_clear()


def test_adapters_on_a_copy_of_an_optimized_model(caplog):
    model, ids = made()
    optimized = copy.deepcopy(hexa_fx.optimize_(copy.deepcopy(model), ids, CONFIG))
    original, optimized = (peft.get_peft_model(m, lora()) for m in (model, optimized))
    assert_same(original, optimized, ids)
    assert_lean(optimized, ids)
    assert "original forward" not in caplog.text


@pytest.mark.parametrize("order", ["adapters first", "optimize first"])
@pytest.mark.parametrize("targets", [BOTH, BOTH[:1], BOTH[1:]], ids=["both", "first", "second"])
def test_results_and_gradients_are_peft_s(order, targets, caplog):
    original, optimized, ids = pair(order, targets)
    assert_same(original, optimized, ids)
    assert_same(original.train(), optimized.train(), ids)
    trained = [name for name, p in optimized.named_parameters() if p.grad is not None]
    assert trained
    assert all("lora" in name for name in trained)
    assert_lean(optimized, ids)
    assert "added to their weights" not in caplog.text


def test_transposed_experts_with_biases():
    """gpt-oss stores (E, in, out), with biases and interleaved gates."""
    original, optimized, ids = pair("optimize first", name="gpt_oss")
    assert_same(original, optimized, ids)
    assert_lean(optimized, ids)


def test_the_first_call_hands_over():
    """PEFT's own way wraps parameters, which a packed one does not let it do under a compiler."""
    _, optimized, ids = pair("optimize first")
    assert_lean(optimized, ids)
    loaded = pickle.loads(pickle.dumps(optimized))
    loaded(ids)  # analysed
    assert_lean(loaded, ids)
    packed = peft.get_peft_model(hexa_fx.quantize_experts_(hexa_fx.optimize_(*made(), CONFIG), "nf4"), lora())
    assert_lean(packed, ids)


@pytest.mark.parametrize("format", [None, "nf4"])
def test_a_compiler_gets_factors_in_one_graph_and_sees_what_is_active(format):
    torch.compiler.reset()
    graphs, (original, optimized, ids) = [], pair("optimize first")
    if format is not None:
        hexa_fx.quantize_experts_(optimized, format)
        held = dict(optimized.named_parameters())
        for name, p in original.named_parameters():
            p.data.copy_(held[name].dense() if hasattr(held[name], "dense") else held[name].detach())

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(optimized, backend=backend)
    expected, (found, gradients) = outcome(original, ids), outcome(compiled, ids)
    torch.testing.assert_close(found, expected[0])
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[1][name.removeprefix("_orig_mod.")], rtol=1e-6, atol=1e-8)
    assert len(graphs) == 1
    assert "moe_ffn_sources" in graphs[0].code
    assert "baddbmm" not in graphs[0].code
    with original.disable_adapter(), optimized.disable_adapter():
        torch.testing.assert_close(compiled(ids).logits, original(ids).logits)
    for model in (original, optimized):
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.scaling["default"] = 0.3
    torch.testing.assert_close(compiled(ids).logits, original(ids).logits)
    torch.compiler.reset()


def test_rank_stabilised_scaling_and_other_ranks():
    original, optimized, ids = pair("optimize first", use_rslora=True, r=5)
    assert_same(original, optimized, ids)
    assert_lean(optimized, ids)


def test_several_adapters_are_switched_disabled_merged_and_deleted():
    original, optimized, ids = pair("optimize first")
    for model in (original, optimized):
        model.add_adapter("other", lora(seed=1, r=2))
    for model in (original, optimized):
        for name in ("default", "other"):
            torch.manual_seed(3 + len(name))
            for key, p in model.named_parameters():
                if name in key:
                    nn.init.normal_(p, std=0.3)
    results = []
    for adapter in ("default", "other", "default"):
        for model in (original, optimized):
            model.set_adapter(adapter)
        assert_same(original, optimized, ids)
        results.append(optimized(ids).logits.detach())
    assert not torch.allclose(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert_lean(optimized, ids)
    for model in (original, optimized):
        model.base_model.set_adapter(["default", "other"])
    assert_same(original, optimized, ids)
    assert_lean(optimized, ids)
    with original.disable_adapter(), optimized.disable_adapter():
        torch.testing.assert_close(optimized(ids).logits, original(ids).logits)
        assert_lean(optimized, ids, adapted=False)
    for model in (original, optimized):
        model.base_model.set_adapter("default")
        model.merge_adapter()
    torch.testing.assert_close(optimized(ids).logits, results[0])
    assert_lean(optimized, ids, adapted=False)
    for model in (original, optimized):
        model.unmerge_adapter()
        model.delete_adapter("other")
    assert_same(original, optimized, ids)
    plain = optimized.merge_and_unload()
    torch.testing.assert_close(plain(ids).logits, results[0])


def test_modules_to_save_are_trained_beside():
    original, optimized, ids = pair("optimize first", modules_to_save=["lm_head"])
    assert_same(original.train(), optimized.train(), ids)
    assert any("lm_head" in name for name in outcome(optimized, ids)[1])


def test_gradient_checkpointing():
    original, optimized, ids = pair("optimize first")
    for model in (original, optimized):
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same(original, optimized, ids)


@pytest.mark.parametrize(("dtype", "to"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_autocast(dtype, to):
    """Of two adapters, whose factors lie side by side, which torch.cat refuses the other 16-bit dtype."""
    original, optimized, ids = pair("optimize first")
    for model in (original, optimized):
        model.add_adapter("other", lora(seed=1))
        model.base_model.set_adapter(["default", "other"])
        model.to(dtype)
    with torch.autocast("cpu", to):
        expected, found = original(ids).logits, optimized(ids).logits
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)


def test_a_block_in_its_own_code_has_its_adapters():
    """Small inputs, or a call that it was not recorded for."""
    original, optimized, ids = pair("optimize first")
    for module in optimized.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, hexa_fx.runtime.install.HexaForward):
            for made in forward.specialisations:
                made.small = Small(1 << 30, 1 << 30)
    for _ in range(2):
        assert_same(original, optimized, ids)


def test_frozen_experts_without_adapters_have_no_gradient_kernels_and_keep_no_input():
    model, ids = made()
    optimized = peft.get_peft_model(
        hexa_fx.optimize_(model, ids, CONFIG), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    ).train()
    loss = optimized(ids).logits.sum()
    with Launches() as launches:
        loss.backward()
    assert not any("lora" not in name for name, p in optimized.named_parameters() if p.grad is not None)
    weight = optimized.base_model.model.model.layers[0].mlp.experts.gate_up_proj.numel()
    assert launches.largest < weight


def test_backward_keeps_the_adapters_own_weights_and_no_copies():
    model, ids = made()
    model = peft.get_peft_model(hexa_fx.optimize_(model.bfloat16(), ids, CONFIG), lora())
    weights = [p for n, p in model.named_parameters() if "lora" in n]
    assert {p.dtype for p in weights} == {torch.float32}
    model(ids)
    saved = set()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.add(t.untyped_storage().data_ptr()) or t, lambda t: t
    ):
        loss = model(ids).logits.square().sum()
    assert {p.untyped_storage().data_ptr() for p in weights} <= saved
    loss.backward()
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in weights)


def test_copies_and_undo():
    original, optimized, ids = pair("optimize first")
    expected = optimized(ids).logits
    copied = copy.deepcopy(optimized)
    torch.testing.assert_close(copied(ids).logits, expected)
    for name, p in copied.named_parameters():
        if "lora_A" in name:
            p.data.zero_()
    assert not torch.allclose(copied(ids).logits, expected)
    torch.testing.assert_close(optimized(ids).logits, expected)
    hexa_fx.undo_(optimized)
    assert not any("_activate_lora" in vars(module) for module in optimized.modules())
    assert_same(original, optimized, ids)


def test_routing_is_recorded_and_replayed_in_adapted_models():
    for order in ("adapters first", "optimize first"):
        _, optimized, ids = pair(order)
        with torch.no_grad(), hexa_fx.record_routing(optimized) as log:
            expected = optimized(ids).logits
        with torch.no_grad(), hexa_fx.replay_routing(optimized, log):
            torch.testing.assert_close(optimized(ids).logits, expected)


def test_adapters_in_float32_on_a_list_in_bfloat16():
    """PEFT's default: each expert casts its rows to what its adapters multiply in."""
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    original = peft.get_peft_model(nn.Sequential(Listed()).bfloat16(), config)
    x = torch.randn(9, 8).bfloat16()
    optimized = hexa_fx.optimize(original, x, CONFIG)
    assert operators_run(optimized, (x,)) > 0
    for model in (original, optimized):
        model(x).float().square().sum().backward()
    torch.testing.assert_close(optimized(x), original(x), rtol=2e-2, atol=2e-2)
    for one, other in zip(optimized.parameters(), original.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=2e-2)


def test_adapters_of_other_forms_on_a_list():
    """The refusal is of tokens that can be told apart, though two of the example are equal."""
    x = torch.randn(9, 8)
    x[3] = x[1]
    sums = peft.MissConfig(r=2, target_modules=["up"], init_weights=False)
    original = peft.get_peft_model(nn.Sequential(Listed()), sums)
    for block in original.modules():  # whose first product reads something narrower than a token
        for parameter in getattr(block, "miss_block", {}).values():
            nn.init.normal_(parameter)
    torch.testing.assert_close(hexa_fx.optimize(original, x, CONFIG)(x), original(x))
    uneven = peft.LoraConfig(
        r=2, target_modules=["up"], rank_pattern={r"0\.up": 3}, lora_dropout=0.1, init_lora_weights=False
    )
    report = hexa_fx.optimize(peft.get_peft_model(nn.Sequential(Listed()), uneven), x, CONFIG).report
    assert "0.up.lora_A.default.weight has no like in the others" in str(report)


def test_a_stack_of_a_submodule_is_adapted_in_the_block_s_own_code_without_vain_advice(caplog):
    targets = ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]
    original, optimized, ids = pair("optimize first", targets, "llama4_text")
    for _ in range(2):  # the first says nothing, since the module around is tried in the second
        assert_same(original, optimized, ids)
    assert "the weight of an expert's matrix product is made of several parameters" in caplog.text
    assert "undo_" not in caplog.text
