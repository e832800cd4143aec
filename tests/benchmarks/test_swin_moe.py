"""The model behind docs/swin_moe.md, and every baseline against it."""

import copy
import sys
import types

import pytest
import torch

import hexa_fx
from benchmarks.swin_moe.baselines import DroplessExperts, PaddedExperts, places
from benchmarks.swin_moe.contestants import BASELINES
from benchmarks.swin_moe.libraries import NotInstalled
from benchmarks.swin_moe.model import Experts, SwinMoe, from_windows, shift_mask, swin_config, to_windows

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def experts():
    torch.manual_seed(0)
    return Experts(4, 16, 24).double()


def routed(tokens, top_k, experts=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 16, generator=generator, dtype=torch.float64)
    ids = (
        torch.rand(tokens, experts, generator=generator).topk(top_k).indices if tokens else torch.zeros(0, top_k).long()
    )
    return x, ids, torch.rand(tokens, top_k, generator=generator, dtype=torch.float64)


def gradients(module, x, ids, weights):
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = module(x, ids, weights)
    (y * torch.arange(y.numel()).view_as(y).cos()).sum().backward()
    found = [y.detach(), x.grad, weights.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    return found


@pytest.mark.parametrize("tokens", [1, 9, 40])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("make", [lambda e: DroplessExperts(e, compute="loop"), lambda e: PaddedExperts(e, factor=0)])
def test_baselines_that_drop_nothing_equal_the_model(experts, make, top_k, tokens):
    case = routed(tokens, top_k)
    for ours, theirs in zip(gradients(make(experts), *case), gradients(experts, *case), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_grouped_matmul_equals_the_model(experts):
    single, case = copy.deepcopy(experts).float(), [t.float() if t.is_floating_point() else t for t in routed(40, 2)]
    for ours, theirs in zip(gradients(DroplessExperts(single), *case), gradients(single, *case), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_padded_drops_what_exceeds_the_capacity(experts):
    x, _, weights = routed(8, 1)
    ids = torch.zeros(8, 1, dtype=torch.long)  # all to one expert: room for ceil(1.25 * 8 / 4) = 3
    ours, theirs = PaddedExperts(experts, factor=1.25)(x, ids, weights), experts(x, ids, weights)
    torch.testing.assert_close(ours[:3], theirs[:3])
    assert not ours[3:].any()
    dx = gradients(PaddedExperts(experts, factor=1.25), x, ids, weights)[1]
    assert dx[:3].any()
    assert not dx[3:].any()


def test_first_choices_queue_first():
    assert places(torch.tensor([[0, 1], [1, 0], [0, 1]]), 2, 2).tolist() == [[0, 3], [2, 4], [1, 4]]


@pytest.mark.parametrize("name", ["tutel", "megablocks-moe", "megablocks-dmoe"])
def test_libraries_follow_the_model_where_they_are_installed(name):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    experts = Experts(4, 128, 128).to(device)
    with torch.no_grad():
        experts.b1.zero_(), experts.b2.zero_()  # MegaBlocks' experts have none
    try:
        other = BASELINES[name](experts, None)
    except NotInstalled as error:
        pytest.skip(str(error))
    x, ids = torch.randn(64, 128, device=device), torch.arange(128, device=device).view(64, 2) % 4
    weights = torch.full((64, 2), 0.5, device=device)
    torch.testing.assert_close(other(x, ids, weights), experts(x, ids, weights), rtol=3e-2, atol=3e-2)


def test_a_library_that_breaks_on_import_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "tutel", None)
    with pytest.raises(NotInstalled, match="tutel"):
        BASELINES["tutel"](Experts(4, 8, 8), None)


def test_tutel_adapter_hands_over_routing_and_weights(monkeypatch, experts):
    """Against a stand-in with Tutel's interface: scores in, dispatched rows out, weights applied in decode."""

    def top_k_routing(scores, top_k, capacity_factor):
        weights, ids = scores.topk(top_k)
        return (ids, weights / weights.sum(-1, keepdim=True) if top_k > 1 else weights, scores.shape), 0.0

    def fast_encode(x, routed):
        ids, _, (tokens, count) = routed
        rows = x.new_zeros(count, tokens, x.shape[1])
        rows[ids.flatten(), torch.arange(tokens).repeat_interleave(ids.shape[1])] = x.repeat_interleave(ids.shape[1], 0)
        return rows

    def fast_decode(rows, routed):
        ids, weights, (tokens, _) = routed
        return (rows[ids, torch.arange(tokens)[:, None]] * weights[..., None].to(rows.dtype)).sum(1)

    moe = types.ModuleType("tutel.moe")
    moe.top_k_routing, moe.fast_encode, moe.fast_decode = top_k_routing, fast_encode, fast_decode
    for name, module in {
        "tutel": types.ModuleType("tutel"),
        "tutel.moe": moe,
        "tutel.net": types.ModuleType("net"),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    for top_k in (1, 2):
        x, ids, weights = routed(12, top_k)
        torch.testing.assert_close(
            BASELINES["tutel"](experts, None)(x, ids, weights), experts(x, ids, weights), rtol=1e-5, atol=1e-6
        )


# --- the model -----------------------------------------------------------------------------------------------------------


def test_sizes_are_those_of_swin_moe():
    with torch.device("meta"):
        counts = {
            scale: sum(p.numel() for p in SwinMoe(swin_config(scale)).parameters()) for scale in ("small", "base")
        }
    assert counts["base"] / 1e6 == pytest.approx(280, abs=2)
    assert counts["small"] / 1e6 == pytest.approx(158, abs=2)
    mixtures = [n for n, m in SwinMoe(swin_config("tiny")).named_modules() if type(m).__name__ == "MoeMlp"]
    assert mixtures == ["stages.1.1.mlp", "stages.2.1.mlp"]


def test_windows_and_their_mask():
    x = torch.randn(2, 8, 8, 3)
    torch.testing.assert_close(from_windows(to_windows(x, 4), 4, 8), x)
    mask = shift_mask(8, 4, 2)
    assert mask.shape == (4, 16, 16)
    assert not mask[0].any()  # the first window was not wrapped around
    assert (mask[3] < 0).sum() == 16 * 12  # the last one holds four pieces of four tokens


@pytest.mark.parametrize("router", ["cosine", "linear"])
def test_optimize_keeps_the_model(router):
    model, images = SwinMoe(swin_config("tiny", top_k=2, experts=3, router=router)), torch.randn(2, 3, 32, 32)
    optimized = hexa_fx.optimize(model, images, hexa_fx.HexaConfig(strict=True))
    assert len(optimized.report.rewritten) == 2
    for ours, theirs in zip(optimized(images), model(images), strict=True):
        torch.testing.assert_close(ours, theirs)


# --- switches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", ["expert_operators", "fused_kernel", "topk_memory"])
def test_a_switched_off_technique_changes_no_value(off):
    model, images = SwinMoe(swin_config("tiny", top_k=2, experts=3)).double(), torch.randn(2, 3, 32, 32).double()
    other = hexa_fx.optimize(model, images, hexa_fx.HexaConfig(strict=True, verify=False, **{off: False}))
    plain = dict(model.named_parameters())
    grads = {}
    for net in (model, other):
        net(images)[0].square().sum().backward()
        grads[net] = {name: p.grad.clone() for name, p in plain.items()}
        model.zero_grad()
    for name, grad in grads[model].items():
        torch.testing.assert_close(grads[other][name], grad, msg=lambda m, name=name: f"{name}: {m}")


def test_without_experts_nothing_is_computed_and_every_parameter_trains(experts):
    x, ids, weights = routed(12, 2)
    y, dx, dweights, *parameters = gradients(BASELINES["none"](experts, None), x, ids, weights)
    torch.testing.assert_close(y, x)
    assert dx is not None
    assert not dweights.any()
    assert all(not p.any() for p in parameters)
