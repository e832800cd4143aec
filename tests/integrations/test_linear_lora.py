"""PEFT's LoRA on linear layers of listed experts: factors reach the operators whatever is active."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import pytorch_utils

import hexa_fx
from hexa_fx import HexaConfig
from hexa_fx.formats.quantized_weight import QuantizedWeight
from tests.api.test_quantize_lists import Gated, outcome
from tests.integrations.test_transformers import operators_run
from tests.zoo.common import Looped

peft = pytest.importorskip("peft")
from peft.helpers import rescale_adapter_scale  # noqa: E402
from peft.utils.hotswap import prepare_model_for_compiled_hotswap  # noqa: E402

CONFIG = HexaConfig(own_code_when_small=False)
E, D, H = 4, 8, 12
ALL = ["gate", "up", "down"]


class Block(Looped):
    def __init__(self):
        super().__init__(lambda: Gated(D, H), D, E, bias=True)

    def mix(self, flat, weights, indices):
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(indices == number)
            out.index_add_(0, token, (expert(flat[token]) * weights[token, slot, None]).to(flat.dtype))
        return out


def lora(targets=ALL, **options):
    return peft.LoraConfig(
        **{"r": 2, "lora_alpha": 3, "init_lora_weights": False, "target_modules": targets, **options}
    )


def add(model, name, config, seed):
    torch.manual_seed(seed)
    model.add_adapter(name, config)


@pytest.fixture
def tokens():
    torch.manual_seed(1)
    return torch.randn(11, D, dtype=torch.float64)


ORDERS = pytest.mark.parametrize("order", ["optimize first", "adapters first"])


def pair(tokens, config, order="optimize first", options=CONFIG):
    """The adapted original, and the same optimized before or after its adapters were added."""
    torch.manual_seed(0)
    model = nn.Sequential(Block()).double()
    other = copy.deepcopy(model)
    if order == "optimize first":
        hexa_fx.optimize_(other, tokens, options)
    made = []
    for each in (model, other):
        torch.manual_seed(2)
        made.append(peft.get_peft_model(each, copy.deepcopy(config)).eval())
    return made if order == "optimize first" else [made[0], hexa_fx.optimize_(made[1], tokens, options)]


def assert_same(original, optimized, x, rewritten=True):
    """Outputs and all gradients; experts without tokens have gradients of zeros in place of none."""
    expected, found = outcome(original, x), outcome(optimized, x)
    torch.testing.assert_close(found[:2], expected[:2])
    assert expected[2].keys() <= found[2].keys()
    for name, gradient in found[2].items():
        torch.testing.assert_close(gradient, expected[2].get(name, torch.zeros_like(gradient)))
    assert (operators_run(optimized, (x,)) > 0) == rewritten


@ORDERS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"targets": ["up"]},
        {"targets": ["down", "router"]},
        {"use_rslora": True, "modules_to_save": ["router"]},
        {"rank_pattern": {r"experts\.2\.up": 5}, "alpha_pattern": {r"experts\.1\.down": 7}},
        {"exclude_modules": ["0.experts.1.up", "0.experts.3.gate", "0.experts.0.down"]},
        {"lora_dropout": 0.5, "targets": ["up", "router"]},
    ],
    ids=["all", "up", "router", "rslora", "patterns", "excluded", "dropout in eval mode"],
)
def test_adapters_run_rewritten(options, order, tokens, caplog):
    assert_same(*pair(tokens, lora(**options), order), tokens)
    assert "original forward" not in caplog.text


@ORDERS
def test_switched_combined_disabled_merged_scaled_and_deleted(order, tokens):
    original, optimized = both = pair(tokens, lora(), order)
    for model in both:
        add(model, "other", lora(["up"], r=3), 3)
    for names in ("default", "other", ["other", "default"], "default"):
        for model in both:
            model.base_model.set_adapter(names)
        assert_same(original, optimized, tokens)
    with original.disable_adapter(), optimized.disable_adapter():
        torch.testing.assert_close(optimized(tokens), original(tokens))
        assert operators_run(optimized, (tokens,))
    for change in ("merge_adapter", "unmerge_adapter"):
        for model in both:
            getattr(model, change)()
        torch.testing.assert_close(optimized(tokens), original(tokens))
        assert operators_run(optimized, (tokens,))
    for model in both:
        for layer in model.modules():
            if hasattr(layer, "scale_layer"):
                layer.scale_layer(2.5)
    assert_same(original, optimized, tokens)
    with rescale_adapter_scale(original, 0.5), rescale_adapter_scale(optimized, 0.5):
        assert_same(original, optimized, tokens)
    for model in both:
        model.delete_adapter("other")
    assert_same(original, pickle.loads(pickle.dumps(optimized)), tokens)
    assert_same(original, copy.deepcopy(optimized), tokens)
    original, optimized = original.merge_and_unload(), optimized.merge_and_unload()
    torch.testing.assert_close(optimized(tokens), original(tokens))
    assert operators_run(optimized, (tokens,))


@ORDERS
def test_dora_is_a_scale_of_rows_whatever_else_is_active(order, tokens, caplog):
    dora = {"use_dora": True, "exclude_modules": ["0.experts.1.up", "0.experts.3.gate"]}
    original, optimized = both = pair(tokens, lora(rank_pattern={r"experts\.2\.up": 5}, **dora), order)
    for model in both:
        add(model, "plain", lora(["up", "down"], r=3), 3)
        add(model, "other", lora(["gate", "up"], use_dora=True), 4)
        for name, norms in model.named_parameters():
            if "magnitude" in name:
                norms.data *= torch.linspace(0.5, 2, len(norms), dtype=norms.dtype)
    for names in ("default", ["default", "plain"], ["plain", "other", "default"], "plain"):
        for model in both:
            model.base_model.set_adapter(names)
        assert_same(original, optimized, tokens)
    assert "original forward" not in caplog.text
    for model in both:
        model.base_model.set_adapter(["other"])
        model.base_model.model[0].experts[1].up.set_adapter(["plain", "other"])
        model.base_model.model[0].experts[2].up.set_adapter(["other", "plain"])
    assert_same(original, optimized, tokens, rewritten=False)
    assert "with DoRA that makes a difference" in caplog.text


def in_fixed_order(tokens, order, packed):
    """An original and its batch-invariant form, on tokens with scores that no order of a sum rounds."""
    original, optimized = pair(tokens, lora(ALL), order, HexaConfig(batch_invariant=True))
    if packed:
        hexa_fx.quantize_experts_(optimized, "int8_rows")
        dense = {name: p.dense() for name, p in optimized.named_parameters() if isinstance(p, QuantizedWeight)}
        original.load_state_dict(dense, strict=False)
    for model in (original, optimized):
        model.base_model.model[0].router.weight.data.mul_(8).round_().div_(8)
    return original, optimized, (tokens * 8).round() / 8


@pytest.mark.parametrize("packed", [False, True])
@ORDERS
def test_a_token_has_the_same_bits_in_any_batch(packed, order, tokens, caplog):
    original, optimized, tokens = in_fixed_order(tokens, order, packed)
    assert_same(original, optimized, tokens)
    with torch.no_grad():
        whole = optimized(tokens)
        assert torch.equal(torch.cat([optimized(part) for part in tokens.split([1, 4, 6])]), whole)
    assert "original forward" not in caplog.text


@pytest.mark.parametrize(("packed", "order"), [(False, "adapters first"), (True, "optimize first")])
def test_a_token_has_the_same_bits_in_any_compiled_batch(packed, order, tokens, caplog):
    _, optimized, tokens = in_fixed_order(tokens, order, packed)
    torch.compiler.reset()
    compiled = torch.compile(optimized, backend="eager")
    with torch.no_grad():
        assert torch.equal(torch.cat([compiled(part) for part in tokens.split([4, 7])]), optimized(tokens))
    torch.compiler.reset()
    assert "original forward" not in caplog.text


@ORDERS
def test_taken_off_and_put_on_again_with_a_router_that_is_trained(order, tokens, caplog):
    original, optimized = both = pair(tokens, lora(modules_to_save=["router"]), order)
    with torch.no_grad():
        for model in both:
            model.base_model.model[0].router.modules_to_save["default"].weight.mul_(2)
    with original.disable_adapter(), optimized.disable_adapter():
        torch.testing.assert_close(optimized(tokens), original(tokens))
    assert_same(original, optimized, tokens)
    assert "original forward" not in caplog.text
    original, optimized = both = pair(tokens, lora(["up", "down"]), order)
    both = [model.unload() for model in both]
    torch.testing.assert_close(both[1](tokens), both[0](tokens))
    for model in both:
        torch.manual_seed(5)
        peft.inject_adapter_in_model(lora(["gate"], r=3), model)
    assert_same(*both, tokens)
    assert "original forward" not in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_dora": True, "lora_dropout": 0.5}, "drops numbers in training"),
        ({"lora_bias": True, "targets": ["down"]}, "is no plain LoRA"),
        ({"lora_dropout": 0.5}, "drops numbers in training"),
    ],
    ids=["dora", "bias", "dropout"],
)
def test_what_is_no_low_rank_product_runs_the_block_s_own_code(options, said, tokens, caplog):
    original, optimized = pair(tokens, lora(**options))
    results = []
    for model in (original, optimized):
        torch.manual_seed(4)
        results.append(model.train()(tokens))
    torch.testing.assert_close(*results)
    optimized(tokens)  # what stands in the way is said once the module around was tried as well
    assert said in caplog.text or "dropout is active" in caplog.text or not optimized.base_model.model[0].forward.own


@pytest.mark.parametrize(("kind", "helped"), [("LoHaConfig", False), ("IA3Config", True)])
def test_adapters_of_another_kind_are_named_with_what_helps(kind, helped, tokens, caplog):
    options = {"target_modules": ["up"], **({"feedforward_modules": []} if helped else {"r": 2})}
    original, optimized = pair(tokens, getattr(peft, kind)(**options))
    assert_same(original, optimized, tokens, rewritten=helped)
    assert ("0 runs its original forward" in caplog.text) != helped


def test_hooks_and_forwards_of_peft_s_modules_run(tokens):
    original, optimized = pair(tokens, lora())
    layers = [model.base_model.model[0].experts[1].up for model in (original, optimized)]
    assert_same(original, optimized, tokens)
    handles = [layer.register_forward_hook(lambda module, args, result: result * 1.5) for layer in layers]
    assert_same(original, optimized, tokens, rewritten=False)
    for handle in handles:
        handle.remove()
    assert_same(original, optimized, tokens)
    for layer in layers:
        layer.forward = lambda x, inner=layer.forward: inner(x) + 1
    assert_same(original, optimized, tokens, rewritten=False)


@ORDERS
def test_a_forward_that_others_put_on_peft_s_class_runs(order, tokens, graphs, monkeypatch, caplog):
    original, optimized = pair(tokens, lora(), order)
    assert_same(original, optimized, tokens)
    kind = peft.tuners.lora.layer.Linear
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 2 * own(self, x))
    torch.testing.assert_close(optimized(tokens), original(tokens))
    torch.testing.assert_close(torch.compile(optimized, backend=graphs)(tokens), original(tokens))
    monkeypatch.undo()
    assert_same(original, optimized, tokens)


@pytest.mark.parametrize("part", ["lora_A", "lora_B", "lora_dropout"])
def test_hooks_of_what_peft_s_modules_call_run(part, tokens):
    """Also of adapters that differ from expert to expert, and of dropouts that drop nothing."""
    original, optimized = pair(tokens, lora(rank_pattern={r"experts\.2\.up": 5}))
    assert_same(original, optimized, tokens)
    for model in (original, optimized):
        called = getattr(model.base_model.model[0].experts[1].up, part)["default"]
        called.register_forward_hook(lambda module, args, result: result * 1.5)
    assert_same(original, optimized, tokens, rewritten=False)


def test_an_optimizer_step_and_a_loaded_adapter(tokens, tmp_path):
    original, optimized = both = pair(tokens, lora())
    assert_same(original, optimized, tokens)
    for model in both:
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.1).step()
    assert_same(original, optimized, tokens)
    optimized.save_pretrained(tmp_path)
    for model in both:
        model.load_adapter(tmp_path, "loaded")
        model.set_adapter("loaded")
    assert_same(original, optimized, tokens)


def test_autocast_to_the_other_16_bits_than_the_adapters(tokens):
    tokens = tokens.bfloat16()
    original = peft.get_peft_model(nn.Sequential(Block()).bfloat16(), lora(), autocast_adapter_dtype=False)
    optimized = hexa_fx.optimize(original, tokens, CONFIG)
    with torch.autocast("cpu", torch.float16):
        torch.testing.assert_close(optimized(tokens), original(tokens), rtol=0.1, atol=0.1)
        assert operators_run(optimized, (tokens,))


class Graphs:
    """A backend that keeps what it gets."""

    def __init__(self):
        self.code = []

    def __call__(self, graph, inputs):
        self.code.append(graph.code)
        return graph.forward


@pytest.fixture
def graphs():
    torch.compiler.reset()
    yield Graphs()
    torch.compiler.reset()


def test_a_compiler_gets_factors_in_one_graph_and_sees_what_is_active(tokens, graphs):
    original, optimized = both = pair(tokens, lora())
    for model in both:
        add(model, "other", lora(["up"], r=3, exclude_modules=["0.experts.1.up"]), 3)
        model.base_model.set_adapter(["other", "default"])
    compiled = torch.compile(optimized, backend=graphs)
    expected, found = outcome(original, tokens), outcome(compiled, tokens)
    torch.testing.assert_close(found[:2], expected[:2])
    for name, gradient in found[2].items():
        wanted = expected[2].get(name.removeprefix("_orig_mod."), torch.zeros_like(gradient))
        torch.testing.assert_close(gradient, wanted)
    with original.disable_adapter(), optimized.disable_adapter():
        torch.testing.assert_close(compiled(tokens), original(tokens))
    for model in both:
        model.base_model.set_adapter("other")
        for layer in model.modules():
            if "other" in getattr(layer, "lora_A", ()):
                layer.set_scale("other", 2.5)
    torch.testing.assert_close(compiled(tokens), original(tokens))
    assert [code.count("= torch.ops.hexa.moe_ffn") for code in graphs.code] == [1, 1, 1]
    assert ["moe_ffn_sources" in code for code in graphs.code] == [True, False, True]


def test_scales_that_are_tensors(tokens, graphs):
    """PEFT makes them so, to exchange adapters of compiled models."""
    original, optimized = both = pair(tokens, lora())
    for model in both:
        prepare_model_for_compiled_hotswap(model, target_rank=4)
    compiled = torch.compile(optimized, backend=graphs)
    for scale in (0.3, 2.0):
        for layer in (
            layer for model in both for layer in model.modules() if "default" in getattr(layer, "scaling", ())
        ):
            layer.scaling["default"].fill_(scale)
        assert_same(original, optimized, tokens)
        torch.testing.assert_close(compiled(tokens), original(tokens))
    assert ["moe_ffn_sources" in code for code in graphs.code] == [True]


def test_a_compiler_goes_through_adapters_that_were_there_before(tokens, graphs):
    original, optimized = pair(tokens, lora(["up", "router"]), "adapters first")
    torch.testing.assert_close(torch.compile(optimized, backend=graphs)(tokens), original(tokens))
    assert ["moe_ffn_sources" in code for code in graphs.code] == [True]


def test_what_a_compiler_finds_to_be_no_low_rank_product_is_said_once(tokens, graphs, caplog):
    original, optimized = pair(tokens, lora(["up"], lora_dropout=0.5))
    results = []
    for model in (original, torch.compile(optimized, backend=graphs)):
        torch.manual_seed(4)
        results.append(model.train()(tokens))
    torch.testing.assert_close(*results)
    said = "under torch.compile: adapter 'default' of 'experts.0.up' drops numbers in training; call hexa_fx.undo_"
    assert sum(said in text for text in caplog.messages) == 1
    original, optimized = pair(tokens, lora(["up"], use_dora=True))
    torch.testing.assert_close(torch.compile(optimized, backend=graphs)(tokens), original(tokens))
    assert sum("is DoRA, of which the norms are not traced" in text for text in caplog.messages) == 1


def test_layers_that_hold_their_weight_transposed_run_their_own_code(tokens, caplog):
    model = nn.Sequential(Block())
    for expert in model[0].experts:
        expert.gate, expert.up = (pytorch_utils.Conv1D(H, D) for _ in range(2))
    optimized = hexa_fx.optimize(model.double(), tokens, CONFIG)
    both = []
    for each in (model, optimized):
        torch.manual_seed(2)
        both.append(peft.get_peft_model(each, lora(ALL, fan_in_fan_out=True)).eval())
    assert_same(*both, tokens)


def test_an_adapter_on_a_router_whose_weight_is_read_stays_in_the_code(tokens):
    class Reads(Block):
        def route(self, x):
            return nn.functional.linear(x, self.router.weight).softmax(-1).topk(2)

    torch.manual_seed(0)
    original = peft.get_peft_model(nn.Sequential(Reads()).double(), lora([*ALL, "router"])).eval()
    optimized = hexa_fx.optimize(original, tokens, CONFIG)
    torch.testing.assert_close(optimized(tokens), original(tokens))


class Grouped(Block):
    """One of two groups of experts is chosen first."""

    def scores_and_ids(self, x):
        scores = self.router(x).sigmoid()
        group = scores.view(-1, 2, 2).sum(-1).topk(1)[1]
        scores = scores * torch.zeros_like(scores[:, :2]).scatter_(1, group, 1.0).repeat_interleave(2, 1)
        return scores, scores.topk(2)[1]

    def route(self, x):
        scores, ids = self.scores_and_ids(x)
        return scores.gather(1, ids), ids


@pytest.mark.parametrize("options", [{}, {"lora_dropout": 0.5}, {"use_dora": True}], ids=["lora", "dropout", "dora"])
def test_routing_is_replayed_where_adapters_came_first(options, tokens):
    """Also of blocks that run operator by operator, whose gate values follow groups."""
    model = peft.get_peft_model(nn.Sequential(Grouped()).double(), lora(**options)).eval()
    block = model.base_model.model[0]
    ids = torch.randint(2, (len(tokens), 1)) * 2 + torch.tensor([1, 0])
    gates = block.router(tokens).sigmoid().gather(1, ids)
    each = torch.stack([expert(tokens) for expert in block.experts], 1)
    expected = (each.gather(1, ids[:, :, None].expand(-1, -1, D)) * gates[:, :, None]).sum(1)
    trained = [p for p in model.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(expected.square().sum(), trained)
    chosen = block.scores_and_ids(tokens)[1]
    hexa_fx.optimize_(model, tokens, CONFIG)
    with hexa_fx.record_routing(model) as log:
        model(tokens)
    assert torch.equal(log.ids[:, 0].long(), chosen)
    with hexa_fx.replay_routing(model, hexa_fx.RoutingLog(ids[:, None])):
        found = torch.cat([model(piece) for piece in tokens.split([4, 7])])
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(found.square().sum(), trained), wanted, strict=True):
        torch.testing.assert_close(one, other)
