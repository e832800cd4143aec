"""A model without an example is analysed where its forward, or that of a part of it, is first called, whatever lies around it."""

import copy
import functools
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx import optimizing
from hexa_fx.first_call import waiting_of
from hexa_fx.passes.preconditions import PARTITIONED
from tests.zoo.common import looped
from tests.zoo.loops import WherePlusAssign as Block
from tests.zoo.variant import D

CONFIG = hexa_fx.HexaConfig(own_code_when_small=False, strict=True)
IDS = torch.arange(3, 67).view(4, 16)


class Branches(nn.Module):
    """Two towers of blocks with experts, of which a call takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(D, D), Block())
        self.right = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor, right: bool = False) -> torch.Tensor:
        if not right:
            return self.left(x)
        for each in self.right:
            x = x + each(x)
        return x


def counts(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Calls that ran rewritten and in the block's own code, by path."""
    report: Any = model.report
    return {each.path: (each.calls.rewritten, sum(each.calls.own.values())) for each in report.blocks}


@pytest.fixture
def mixtral() -> nn.Module:
    pytest.importorskip("transformers")
    from hexa_fx.integrations.tiny_models import tiny_model

    torch.manual_seed(0)
    return tiny_model("mixtral")[0].eval()


MIXTRAL = "model.layers.{}.mlp.experts"


def calls_inner(model: Any) -> None:
    model.model(input_ids=IDS)


def calls_layers(model: Any) -> None:
    """As pipelines and loops of one's own do."""
    hidden, positions = model.model.embed_tokens(IDS), torch.arange(16)[None]
    for layer in model.model.layers:
        hidden = layer(hidden, position_embeddings=model.model.rotary_emb(hidden, positions), position_ids=positions)


def calls_whole(model: Any) -> None:
    model(input_ids=IDS)


@pytest.mark.parametrize("call", [calls_inner, calls_layers, calls_whole])
def test_parts_that_are_called_alone_are_analysed(mixtral: nn.Module, call: Callable[[Any], None]) -> None:
    opt: Any = hexa_fx.optimize(mixtral, config=CONFIG)
    with torch.no_grad():
        for _ in range(2):
            call(opt)
        wanted = {MIXTRAL.format(layer): (2, 0) for layer in range(2)}
        assert counts(opt) == wanted
        assert opt.report.blocks[1].same_as == MIXTRAL.format(0), "identical layers share an analysis"
        assert set(opt.graphs) == set(wanted)
        torch.testing.assert_close(opt(input_ids=IDS).logits, mixtral(input_ids=IDS).logits)
    assert counts(opt) == dict.fromkeys(wanted, (3, 0))


class Uncalled(nn.Module):
    """Weights of all experts lie in modules that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up, self.down = nn.Linear(D, 4, bias=False), nn.Bilinear(12, D, 4), nn.Bilinear(D, 12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number in range(4):
            token, slot = torch.where(ids == number)
            rows = (x[token] @ self.up.weight[number].T).relu() @ self.down.weight[number].T
            out.index_add_(0, token, rows * weights[token, slot, None])
        return out


def test_weights_in_modules_that_are_never_called() -> None:
    model, x = nn.Sequential(Uncalled()), torch.randn(40, D)
    opt = hexa_fx.optimize(model, config=CONFIG)
    for _ in range(2):
        torch.testing.assert_close(opt(x), model(x))
    assert counts(opt) == {"0": (2, 0)}


def test_a_part_that_was_called_alone_is_analysed_with_the_model_as_its_code_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    opt, x = hexa_fx.optimize(Branches(), config=CONFIG), torch.randn(6, D)
    opt.right[1](x)
    opt(x, True)
    assert not caplog.records
    assert counts(opt) == {"right.0": (1, 0), "right.1": (2, 0)}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_first_call_without_gradients_sees_biases_of_zero(mode: Any) -> None:
    """As new ones are: nothing shows of them in a run, unless they are others in it."""
    pytest.importorskip("transformers")
    from hexa_fx.integrations.tiny_models import tiny_model

    model: Any = hexa_fx.optimize(tiny_model("gpt_oss")[0], config=CONFIG)
    with mode():
        model(input_ids=IDS)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert set(counts(model).values()) == {(2, 0)}


class Forces(nn.Module):
    """As potentials that give forces, whose callers have gradients on."""

    def __init__(self) -> None:
        super().__init__()
        self.moe, self.energy = Block(), nn.Linear(D, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        energy = self.energy(self.moe(x)).sum()
        return energy, torch.autograd.grad(energy, x)[0]


@pytest.mark.parametrize("given", [True, False])
def test_a_model_that_asks_for_gradients_itself(given: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Forces(), torch.randn(2, 7, D)
    opt = hexa_fx.optimize(model, (x,) if given else None, CONFIG)
    for _ in range(2):
        torch.testing.assert_close(opt(x), model(x))
    assert (counts(opt), caplog.messages) == ({"moe": (2, 0)}, [])


def test_a_branch_that_the_first_call_does_not_take() -> None:
    model, x = Branches(), torch.randn(6, D)
    opt = hexa_fx.optimize(model, config=CONFIG)
    for right in (False, True, True, False):
        torch.testing.assert_close(opt(x, right), model(x, right))
    assert counts(opt) == {"left.1": (2, 0), "right.0": (2, 0), "right.1": (2, 0)}
    hexa_fx.undo_(opt)
    assert not any({"forward", "_replicate_for_data_parallel"} & vars(module).keys() for module in opt.modules())


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_wait_by_themselves(copied: Any) -> None:
    opt, x = hexa_fx.optimize(Branches(), config=CONFIG), torch.randn(6, D)
    other = copied(opt)
    other(x)
    other(x, True)
    assert counts(opt) == {}
    assert counts(other) == {"left.1": (1, 0), "right.0": (1, 0), "right.1": (1, 0)}
    assert waiting_of(opt) is not None


def test_the_report_of_a_copy_counts_the_copy_s_calls() -> None:
    """Where the block is the whole model, its report lies in front of its forward."""
    opt, x = hexa_fx.optimize(Branches().left[1], config=CONFIG), torch.randn(6, D)
    opt(x)
    other = copy.deepcopy(opt)
    other(x)
    other(x)
    assert (counts(opt), counts(other)) == ({"": (1, 0)}, {"": (2, 0)})


def test_a_wrapper_that_is_put_in_front_later() -> None:
    """As accelerate puts one for mixed precision, and users for checkpointing."""
    model, x = Branches(), torch.randn(6, D)
    opt = hexa_fx.optimize(model, config=CONFIG)
    for module in (opt, opt.left):  # in closures; what they close over is the module's own
        inner = module.forward
        module.forward = lambda *args, inner=inner: inner(*args) + 0  # type: ignore[method-assign]
    for right in (False, True, False):
        torch.testing.assert_close(opt(x, right), model(x, right))
    assert counts(opt) == {"left.1": (2, 0), "right.0": (1, 0), "right.1": (1, 0)}


class OwnActivation(nn.Module):
    """Keeps a function that closes over the expert itself, as Megatron's gated experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.inner = nn.Linear(D, 16), nn.Linear(8, D), nn.SiLU()

        def gated(x: torch.Tensor) -> torch.Tensor:
            gate, up = x.chunk(2, -1)
            return self.inner(gate) * up

        self.act = gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


def test_functions_that_close_over_the_module_that_keeps_them() -> None:
    block, x = Branches().left[1], torch.randn(6, D)
    block.experts = nn.ModuleList(OwnActivation() for _ in block.experts)
    opt = hexa_fx.optimize(block, config=CONFIG)
    torch.testing.assert_close(opt(x), block(x))
    assert counts(opt) == {"": (1, 0)}


class Runner:
    """Runs experts that a block's modules are, and keeps what it was given last."""

    def __init__(self, experts: nn.ModuleList) -> None:
        self.experts, self.last = experts, None

    def run(self, x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        self.last = index
        return looped(x, weights, index, self.experts)


class RunByAnObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 4), nn.ModuleList(OwnActivation() for _ in range(4))
        self.runner = Runner(self.experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x)
        weights, index = (scores + torch.rand_like(scores) if self.training else scores).softmax(-1).topk(2)
        return self.runner.run(x, weights, index)


def test_experts_that_an_object_of_the_block_runs() -> None:
    """Each kind of calls is analysed beside the block, where that object would run the user's own experts."""
    model, x = RunByAnObject(), torch.randn(6, D)
    opt = hexa_fx.optimize(model, config=CONFIG)
    runner = opt.runner
    for train in (False, True):
        found = []
        for each in (model, opt):
            torch.manual_seed(0)
            each.zero_grad()
            (out := each.train(train)(x)).square().sum().backward()
            found.append([out, each.runner.last, *(parameter.grad for parameter in each.parameters())])
        torch.testing.assert_close(*found)
    assert (opt.runner, runner.experts, counts(opt)) == (runner, opt.experts, {"": (2, 0)})


def test_a_wrapper_around_a_model_that_is_a_block_itself() -> None:
    block, x = Branches().left[1], torch.randn(6, D)
    opt = hexa_fx.optimize(block, config=CONFIG)
    inner = opt.forward
    opt.forward = lambda x: inner(x) + 1  # type: ignore[method-assign]
    for _ in range(3):
        torch.testing.assert_close(opt(x), block(x) + 1)
    assert counts(opt) == {"": (3, 0)}


def test_accelerate_after_optimize(mixtral: nn.Module) -> None:
    """Its mixed precision wraps forwards, as Trainer(bf16=True) does; its offloading moves them elsewhere."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    opt = hexa_fx.optimize(mixtral, config=CONFIG)
    prepared = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(opt)
    AcceleratorState._reset_state(True)
    other = hexa_fx.optimize(mixtral, config=CONFIG)
    accelerate.cpu_offload(other, execution_device=torch.device("cpu"))
    for model in (prepared, other):
        for _ in range(2):
            model(input_ids=IDS)
    for model in (opt, other):
        assert counts(model) == {MIXTRAL.format(layer): (2, 0) for layer in range(2)}


@pytest.mark.parametrize("given", [False, True])
def test_parameters_without_elements_between_calls(mixtral: nn.Module, given: bool) -> None:
    """As DeepSpeed's ZeRO-3 has them where blocks are leaves to it. Its hooks know the user's parameters, not copies."""
    whole = {id(p): p.data for p in mixtral.parameters()}
    expected = torch.autograd.grad(mixtral(input_ids=IDS).logits.square().sum(), [*mixtral.parameters()])

    def gather(module: nn.Module, *_: Any) -> None:
        for p in module.parameters(recurse=False):
            p.data = whole[id(p)]

    def release(module: nn.Module, *_: Any) -> None:
        for p in module.parameters(recurse=False):
            p.data = torch.empty(0)

    for module in mixtral.modules():
        if not [*module.parameters(recurse=False)]:
            continue
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(release)
        module.register_full_backward_pre_hook(gather)
        release(module)
    model: Any = hexa_fx.optimize_(mixtral, {"input_ids": IDS} if given else None, config=CONFIG)
    for _ in range(2):
        found = torch.autograd.grad(model(input_ids=IDS).logits.square().sum(), [*model.parameters()])
    torch.testing.assert_close(found, expected)
    assert counts(model) == {MIXTRAL.format(layer): (2, 0) for layer in range(2)}


@pytest.mark.parametrize("given", [False, True])
def test_a_model_that_zero_3_has_is_not_analysed(given: bool) -> None:
    """An analysis calls modules, which DeepSpeed counts: its step then raised an error. What was analysed before runs."""
    torch.manual_seed(0)
    calls, x, now, before = list[int](), torch.randn(6, D), Branches(), Branches()
    hexa_fx.optimize_(before, x, config=CONFIG)
    for parameter in (*now.parameters(), *before.parameters()):
        parameter.ds_status = "here"  # type: ignore[attr-defined]
    for model in (now, before):
        model.left[0].register_forward_pre_hook(lambda *_: calls.append(1))
    hexa_fx.optimize_(now, x if given else None)
    for model in (now, before, now, before):
        model(x)
    assert len(calls) == 4
    assert str(now.report) == PARTITIONED
    assert counts(before)["left.1"] == (2, 0)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_model_that_is_compiled_before_its_first_call(fullgraph: bool) -> None:
    """The first call is analysed outside of graphs, and the second compiles what is there then. One graph cannot hold that."""
    torch._dynamo.reset()
    opt, x, seen = hexa_fx.optimize(Branches(), config=CONFIG), torch.randn(6, D), list[str]()

    def backend(module: Any, _: Any) -> Any:
        seen.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    compiled = torch.compile(opt, backend=backend, fullgraph=fullgraph)
    if fullgraph:
        with pytest.raises(Exception, match="call it once before"):
            compiled(x)
        return
    expected = compiled(x)
    torch.testing.assert_close(compiled(x), expected)
    assert counts(opt) == {"left.1": (1, 0)}
    assert "hexa.moe_ffn.default" in seen


def test_a_step_with_its_backward_that_is_compiled_before_the_first_call() -> None:
    """A compiler is at work while backward runs, and would compile ours."""
    torch._dynamo.reset()
    opt, x, compiled = hexa_fx.optimize(Branches(), config=CONFIG), torch.randn(6, D), set[str]()

    def backend(module: Any, _: Any) -> Any:
        compiled.update(line for node in module.graph.nodes if (line := node.stack_trace))
        return module.forward

    def step() -> torch.Tensor:
        loss = opt(x).square().sum()
        loss.backward()
        return loss.detach()

    compiled_step = torch.compile(step, backend=backend)
    compiled_step()
    assert not [line for line in compiled if "hexa_fx/ops" in line]
    first = [p.grad.clone() for p in opt.left.parameters()]
    compiled_step()
    torch.testing.assert_close([p.grad for p in opt.left.parameters()], [2 * grad for grad in first])


def test_optimize_again_before_the_first_call() -> None:
    model, x = Branches(), torch.randn(6, D)
    hexa_fx.optimize_(model.left, config=CONFIG)
    for _ in range(2):
        hexa_fx.optimize_(model, config=CONFIG)
    for _ in range(2):
        model(x)
    assert counts(model) == {"left.1": (2, 0)}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_first_call_that_ends_early_is_followed_by_another(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """The user ends it, or gives it inputs that the model cannot take."""
    model, x = Branches(), torch.randn(6, D)
    opt = hexa_fx.optimize(model, config=CONFIG)
    given = x
    with pytest.MonkeyPatch.context() as patch:
        if error is KeyboardInterrupt:
            patch.setattr(optimizing, "find_sites", raises(error))
        else:
            given = x[:, 1:]
        with pytest.raises(error):
            opt(given)
    assert not caplog.text
    torch.testing.assert_close(opt(x), model(x))
    torch.testing.assert_close(opt(x, True), model(x, True))
    assert counts(opt) == {"left.1": (1, 0), "right.0": (1, 0), "right.1": (1, 0)}


def test_a_first_call_that_cannot_be_repeated_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    opt = hexa_fx.optimize(Branches(), config=CONFIG)
    monkeypatch.setattr(optimizing, "find_sites", raises(RuntimeError))
    for _ in range(2):
        opt(torch.randn(6, D))
    assert caplog.text.count("runs its own code, since its first call could not be repeated") == 1
    assert opt.report.summary() == "its first call could not be analysed: RuntimeError: ended"
    assert all(waiting_of(module) is None for module in opt.modules())


def raises(error: type[BaseException]) -> Callable[..., Any]:
    def ends(*_: Any, **__: Any) -> Any:
        raise error("ended")

    return ends


def test_export_before_the_first_call(caplog: pytest.LogCaptureFixture) -> None:
    """There is no call to analyse; the model's own code is traced if it can be, and that is said."""
    opt = hexa_fx.optimize(nn.Sequential(nn.Linear(D, D)), config=CONFIG)
    assert torch.export.export(opt, (torch.randn(6, D),)).graph is not None
    assert "it was not analysed before; call it once" in caplog.text


def test_a_replica_of_data_parallel_runs_its_own_code() -> None:
    opt = hexa_fx.optimize(Branches(), config=CONFIG)
    replica: Any = opt._replicate_for_data_parallel()  # type: ignore[operator]
    assert "forward" not in vars(replica)
    assert waiting_of(opt) is not None


class Kept:
    """A hook that is an object, and one that is its method."""

    def __init__(self) -> None:
        self.results: list[torch.Tensor] = []

    def __call__(self, module: nn.Module, args: Any, result: torch.Tensor) -> None:
        self.results.append(result)


def into(results: list[torch.Tensor], module: nn.Module, args: Any, result: torch.Tensor) -> None:
    results.append(result)


HOOKS: dict[str, Callable[[Kept], Callable[..., None]]] = {
    "closure": lambda kept: lambda module, args, result: kept.results.append(result),
    "default": lambda kept: lambda module, args, result, results=kept.results: results.append(result),
    "partial": lambda kept: functools.partial(into, kept.results),
    "object": lambda kept: kept,
    "method": lambda kept: kept.__call__,
}


def counts_in_closure(model: Branches) -> tuple[Callable[..., None], Callable[[], Any]]:
    count = 0

    def hook(*_: Any) -> None:
        nonlocal count
        count += 1

    return hook, lambda: count


def counts_in_module(model: Any) -> tuple[Callable[..., None], Callable[[], Any]]:
    model.count, model.block, model.kept = 0, 0, []

    def hook(self: Any, *_: Any) -> None:
        self.count, self.left[1].block = self.count + 1, getattr(self.left[1], "block", 0) + 1
        self.kept.append(1)

    return types.MethodType(hook, model), lambda: (model.count, model.left[1].block, model.kept)


def counts_in_itself(model: Branches) -> tuple[Callable[..., None], Callable[[], Any]]:
    def hook(*_: Any) -> None:
        count.number += 1  # type: ignore[attr-defined]

    count: Any = hook
    count.number = 0
    return hook, lambda: count.number


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("count", [counts_in_closure, counts_in_module, counts_in_itself])
def test_what_hooks_count_is_of_calls_alone(count: Any, given: bool) -> None:
    found = []
    for optimized in (False, True):
        model, x = Branches(), torch.randn(2, 7, D)
        hook, said = count(model)
        model.left[1].gate.register_forward_hook(hook)
        if optimized:
            hexa_fx.optimize_(model, (x,) if given else None, CONFIG)
        for _ in range(2):
            model(x)
        model.double()(x.double())  # is analysed, too
        found.append(said())
    assert found[0] == found[1]
    assert counts(model)["left.1"] == (3, 0)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("how", HOOKS)
def test_what_hooks_keep_is_of_calls_alone(how: str, given: bool) -> None:
    kept, x = Kept(), torch.randn(2, 7, D)
    model = Branches()
    model.left[1].register_forward_hook(HOOKS[how](kept))
    hexa_fx.optimize_(model, (x,) if given else None, CONFIG)
    results = [model(x) for _ in range(2)]
    assert len(kept.results) == 2
    torch.testing.assert_close(kept.results, results)
