"""The rewritten forward on the user's module: what stays, what must survive, and one call in N that is checked."""

import copy
import inspect
import logging

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.errors import DiffersInUse, InputError
from hexa_fx.runtime.forward import HexaForward
from hexa_fx.runtime.guards import GuardMiss
from hexa_fx.runtime.install import install, is_installed, uninstall
from hexa_fx.runtime.preflight import check_model
from tests.runtime.handmade import D, ListMoE, list_rewritten


@pytest.fixture
def pair() -> tuple[ListMoE, ListMoE]:
    """An original and a rewritten copy with the same weights."""
    torch.manual_seed(0)
    original = ListMoE()
    rewritten = copy.deepcopy(original)
    install(rewritten, list_rewritten(train=True), list_rewritten(train=False))
    return original, rewritten


_OURS = {"forward", "_replicate_for_data_parallel"}


def hidden(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed))


def assert_same(original: nn.Module, rewritten: nn.Module, x: torch.Tensor, tolerance: float = 1e-5) -> None:
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    y1, y2 = original(x1), rewritten(x2)
    torch.testing.assert_close(y2, y1, atol=tolerance, rtol=tolerance)
    original.zero_grad()
    rewritten.zero_grad()
    y1.square().sum().backward()
    y2.square().sum().backward()
    torch.testing.assert_close(x2.grad, x1.grad, atol=tolerance, rtol=tolerance)
    for (name, p1), p2 in zip(original.named_parameters(), rewritten.parameters()):
        g1 = torch.zeros_like(p1) if p1.grad is None else p1.grad
        g2 = torch.zeros_like(p2) if p2.grad is None else p2.grad
        torch.testing.assert_close(
            g2, g1, atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def ran_rewritten(module: nn.Module) -> bool:
    """Whether the last words about this module's forward are not 'runs its original'."""
    return not module.__dict__["forward"].own


def test_forward_and_gradients_in_both_modes(pair):
    original, rewritten = pair
    for training in (True, False):
        assert_same(original.train(training), rewritten.train(training), hidden(2, 5))
    torch.testing.assert_close(rewritten.seen, original.seen)
    assert ran_rewritten(rewritten)


def test_nothing_but_forward_changes(pair):
    original, rewritten = pair
    assert list(original.state_dict()) == list(rewritten.state_dict())
    assert [name for name, _ in original.named_modules()] == [name for name, _ in rewritten.named_modules()]
    assert [name for name, _ in original.named_parameters()] == [name for name, _ in rewritten.named_parameters()]
    assert type(rewritten) is ListMoE
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, rewritten.state_dict()[name])
    assert set(rewritten.__dict__) - set(original.__dict__) == {*_OURS, "_hexa_w1", "_hexa_w2"}


def test_signature_and_doc(pair):
    original, rewritten = pair
    assert inspect.signature(rewritten.forward) == inspect.signature(original.forward)
    assert rewritten.forward.__doc__ == "The list's forward."
    assert rewritten.forward.__name__ == "forward"
    inspect.signature(HexaForward)


def test_uninstall_and_errors(pair):
    original, rewritten = pair
    with pytest.raises(InputError, match="already has"):
        install(rewritten, None, list_rewritten())
    uninstall(rewritten)
    assert not is_installed(rewritten)
    assert set(rewritten.__dict__) == set(original.__dict__)
    assert_same(original, rewritten, hidden(2, 5), 0)
    with pytest.raises(InputError, match="no rewritten forward"):
        uninstall(rewritten)


def test_a_taken_name_is_refused():
    block = ListMoE()
    block._hexa_w2 = 3
    with pytest.raises(InputError, match="already has an attribute '_hexa_w2'"):
        install(block, list_rewritten(), None)
    assert not is_installed(block)
    assert "_hexa_w1" not in block.__dict__


class Named(torch.Tensor):
    """A class of tensors that code can tell from others, and whose functions may be its own."""


@pytest.mark.parametrize("case", ["dtype", "ndim", "class", "constant", "extra", "tensor-for-constant"])
def test_a_guard_miss_runs_the_original_and_says_why_once(pair, caplog, case):
    original, rewritten = pair
    x = hidden(2, 5)
    args, kwargs, sentence = {
        "dtype": ((x.to(torch.complex64),), {}, "not floating"),
        "ndim": ((x[0],), {}, "3 dimensions"),
        "class": ((x.as_subclass(Named),), {}, "from other tensors"),
        "constant": ((x,), {"scale": 2.0}, "another value"),
        "extra": ((x, None, 1), {}, "more positional"),
        "tensor-for-constant": ((x, torch.tensor(2.0)), {}, "now a tensor"),
    }[case]

    def outcome(module):
        try:
            return module(*args, **kwargs)
        except Exception as error:
            return type(error), str(error)

    with caplog.at_level(logging.WARNING, logger="hexa_fx"):
        first, second, expected = outcome(rewritten), outcome(rewritten), outcome(original)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(first, expected)
        assert torch.equal(second, expected)
    else:
        assert first == second == expected
    assert [sentence in record.message for record in caplog.records] == [True]


def test_forward_hooks_and_hooks_of_kept_submodules(pair):
    _, rewritten = pair
    seen = []
    rewritten.register_forward_pre_hook(lambda *_: seen.append("pre"))
    rewritten.register_forward_hook(lambda *_: seen.append("post"))
    rewritten.router.register_forward_hook(lambda *_: seen.append("router"))
    rewritten(hidden(1, 3))
    assert seen == ["pre", "router", "post"]
    assert ran_rewritten(rewritten)


def test_what_was_exchanged_for_nothing_runs_no_more(pair):
    original, rewritten = pair
    forward, x = rewritten.forward, hidden(2, 5)
    rewritten(x)
    forward.exchange((), None)
    with pytest.raises(GuardMiss, match="nothing was made of the block"):
        forward.rewritten(x)
    torch.testing.assert_close(rewritten(x), original(x), rtol=0, atol=0)


def test_an_exchanged_expert_is_run_by_the_original(pair):
    original, rewritten = pair

    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base

        @property
        def weight(self) -> torch.Tensor:
            return self.base.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + 1

    for block in pair:
        block.experts[2].w1 = Adapter(block.experts[2].w1)
    assert_same(original, rewritten, hidden(2, 16))
    assert not ran_rewritten(rewritten)
    copied = copy.deepcopy(rewritten)
    assert_same(original, copied, hidden(2, 16))


def test_fullgraph_compile(pair):
    original, rewritten = pair
    for training in (True, False):
        compiled = torch.compile(rewritten.train(training), fullgraph=True, backend="aot_eager")
        assert_same(original.train(training), compiled, hidden(2, 5))
        assert_same(original, compiled, hidden(3, 4))


def test_export_non_strict(pair):
    original, rewritten = pair
    program = torch.export.export(
        rewritten.eval(), (hidden(2, 5),), dynamic_shapes={"hidden": {0: torch.export.Dim.AUTO}}
    )
    torch.testing.assert_close(program.module()(hidden(4, 5)), original.eval()(hidden(4, 5)))
    assert_same(original, rewritten, hidden(2, 5))


def test_per_sample_gradients_through_functorch(pair):
    original, rewritten = pair
    rewritten.eval()

    def loss(weights, x):
        return torch.func.functional_call(rewritten, weights, (x,)).square().sum()

    weights = {name: p.detach() for name, p in rewritten.named_parameters()}
    grads = torch.func.grad(loss)(weights, hidden(1, 5))
    original.eval()(hidden(1, 5)).square().sum().backward()
    for name, p in original.named_parameters():
        torch.testing.assert_close(grads[name], torch.zeros_like(p) if p.grad is None else p.grad)


def test_fully_sharded_after_installation(pair):
    from torch.distributed.fsdp import fully_shard

    original, rewritten = pair
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        for block in pair:
            fully_shard(block, mesh=mesh)
        x = hidden(2, 16)
        losses = [block(x).square().sum() for block in pair]
        torch.testing.assert_close(losses[1], losses[0])
        for loss in losses:
            loss.backward()
        for p1, p2 in zip(original.parameters(), rewritten.parameters()):
            torch.testing.assert_close(p2.grad.full_tensor(), p1.grad.full_tensor())
        assert ran_rewritten(rewritten)
    finally:
        torch.distributed.destroy_process_group()


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), ListMoE())


def refusal(bad: object) -> str:
    with pytest.raises(InputError) as error:
        check_model(bad)  # type: ignore[arg-type]
    return str(error.value)


def test_an_ordinary_model_passes():
    check_model(model())
    check_model(model().half())
    check_model(nn.Identity())


def test_not_a_module():
    assert "expected an nn.Module, got function" in refusal(lambda x: x)


def test_already_optimized():
    once = model()
    install(once[1], list_rewritten(), None)
    assert "already optimized (1 has a rewritten forward)" in refusal(once)


def test_compiled():
    assert "optimize the model first, then compile" in refusal(torch.compile(model()))


def made(**options: object) -> tuple[ListMoE, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 9, D)
    return hexa_fx.optimize_(ListMoE(), x, hexa_fx.HexaConfig(own_code_when_small=False, **options)), x


def break_it(model: ListMoE) -> None:
    """As if a condition were missing."""
    (made,) = model.forward.specialisations
    plain = made.program.function
    made.program.function = lambda *given: plain(*given) * 1.01


@pytest.mark.parametrize("training", [False, True])
def test_a_block_that_is_as_its_original_goes_on(training: bool) -> None:
    model, x = made(check_every=2)
    model.train(training)(x)  # the analysis of this mode
    seen = model.seen.clone()
    for _ in range(4):
        model(x).sum().backward()
    assert bool((model.seen != seen).any()) is training
    assert (model.seen - seen).sum() == training * 4 * 18 * 2, "the original counts nothing besides"
    assert model.forward.specialisations


def test_a_difference_is_said_and_the_original_runs(caplog: pytest.LogCaptureFixture) -> None:
    model, x = made(check_every=3)
    model(x)
    break_it(model)
    own = hexa_fx.undo_(made()[0])
    with caplog.at_level(logging.WARNING):
        off = [bool((model(x) - own(x)).abs().max() > 1e-6) for _ in range(6)]
    assert off[0]
    assert not any(off[2:])
    assert "one call in 3 found that the rewritten block differs from the original: off by" in caplog.text
    assert "differs" in str(model.report)


def test_strict_raises() -> None:
    model, x = made(check_every=1, strict=True)
    break_it(model)
    with pytest.raises(DiffersInUse, match=r"a check of one call in 1 found .* off by"):
        model(x)


def test_random_numbers_are_those_of_one_run() -> None:
    model, x = made(check_every=1)
    torch.manual_seed(3)
    model(x)
    after = torch.rand(1)
    torch.manual_seed(3)
    hexa_fx.undo_(model)(x)
    assert torch.equal(after, torch.rand(1))


def test_the_compiler_sees_no_check() -> None:
    model, x = made(check_every=1)
    break_it(model)
    compiled = torch.compile(model, backend="eager")
    assert (compiled(x) - hexa_fx.undo_(made()[0])(x)).abs().max() > 1e-6


def test_less_than_never() -> None:
    with pytest.raises(InputError, match="check_every"):
        hexa_fx.HexaConfig(check_every=-1)
