"""Parameters of experts in a list stay where the user has them: they are read one by one, and have gradients of their own."""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hexa_fx
from hexa_fx import HexaConfig

D, WIDTH, E, TOKENS = 8, 12, 10, 48
CONFIG = HexaConfig(verify=False, own_code_when_small=False)


class Plain(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, WIDTH, bias), nn.Linear(WIDTH, D, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Gated(Plain):
    """Gate and up are two parameters, which are read as one weight."""

    def __init__(self, bias: bool) -> None:
        super().__init__(bias)
        self.gate = nn.Linear(D, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class UpFirst(Plain):
    """One parameter, of which the rewritten block reads two halves."""

    def __init__(self, bias: bool) -> None:
        super().__init__(bias)
        self.up = nn.Linear(D, 2 * WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Free(Plain):
    """Products apart, and parameters that are gathered by row."""

    def __init__(self, bias: bool) -> None:
        super().__init__(bias)
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(F.gelu(self.inner(F.relu(self.up(x))))))


class Loop(nn.Module):
    def __init__(self, kind: Callable[[bool], nn.Module] = Gated, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(kind(bias) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            if len(token):
                out = out.index_add(0, token, (expert(x[token]) * weights[token, slot, None]).to(out.dtype))
        return out


def pair(kind: Callable[[bool], nn.Module] = Gated, bias: bool = False, dtype: torch.dtype = torch.float64) -> Any:
    """A model, its optimized copy, and tokens."""
    torch.manual_seed(0)
    own, x = Loop(kind, bias).to(dtype), torch.randn(TOKENS, D, dtype=dtype)
    return own, hexa_fx.optimize_(copy.deepcopy(own), x, CONFIG), x


def assert_trains_alike(own: nn.Module, made: nn.Module, x: Tensor, call: Any = lambda model, x: model(x)) -> None:
    """Results and all gradients; and every gradient of an expert has memory of exactly its size."""
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    results = [call(model, given) for model, given in zip((own, made), inputs)]
    torch.testing.assert_close(*reversed(results))
    for model, result in zip((own, made), results):
        model.zero_grad()
        result.float().square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    for (name, one), two in zip(own.named_parameters(), made.parameters(), strict=True):
        if not one.requires_grad:
            assert two.grad is None, name
            continue
        torch.testing.assert_close(two.grad, torch.zeros_like(one) if one.grad is None else one.grad, msg=name)
        assert two.grad.untyped_storage().nbytes() == two.numel() * two.itemsize, name
    assert made.report.blocks[0].calls.rewritten > 0
    assert not made.report.blocks[0].calls.own


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [Plain, Gated, UpFirst, Free])
def test_nothing_moves(kind, bias):
    """In training and inference, whichever parameters are frozen; what is frozen has no gradient."""
    own, made, x = pair(kind, bias)
    places = [parameter.data_ptr() for parameter in made.parameters()]
    for frozen in ("nothing", "up", "down", "experts.3", "bias", "experts"):
        for model in (own, made):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(frozen not in name)
        assert_trains_alike(own, made, x)
    with torch.no_grad():
        torch.testing.assert_close(made(x), own(x))
    assert [parameter.data_ptr() for parameter in made.parameters()] == places
    assert all(p.untyped_storage().nbytes() == p.numel() * p.itemsize for p in made.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, TOKENS])
def test_dtypes_and_experts_without_tokens(dtype, tokens):
    own, made, x = pair(dtype=dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    results = [model(x[:tokens]) for model in (own, made)]
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
    for result in results:
        result.float().sum().backward()
    for one, two in zip(own.parameters(), made.parameters()):
        expected = torch.zeros_like(one) if one.grad is None else one.grad
        torch.testing.assert_close(two.grad, expected, rtol=tolerance, atol=tolerance)


def with_default_device(model: nn.Module, x: Tensor) -> Tensor:
    with torch.device("cpu"):
        return model(x)


def saved_elsewhere(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model(x)


CALLS = {
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "reentrant checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=True),
    "default device": with_default_device,
    "saved elsewhere": saved_elsewhere,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_ways_of_calling(call):
    assert_trains_alike(*pair(), call)


def flat(model: nn.Module) -> None:
    """All parameters are views of one tensor."""
    parameters = list(model.parameters())
    whole = torch.cat([p.detach().flatten() for p in parameters])
    for parameter, view in zip(parameters, whole.split([p.numel() for p in parameters])):
        parameter.data = view.view_as(parameter)


def share(model: Any) -> None:
    model.experts[4].up.weight = model.experts[2].up.weight


def tie(model: Any) -> None:
    model.experts[4].up.weight.data = model.experts[2].up.weight.data


def swap(model: Any) -> None:
    gc.collect()  # what the analysis held
    first, second = (model.experts[number].down for number in (1, 2))
    torch.utils.swap_tensors(first.weight, second.weight)


def turn(model: Any) -> None:
    for expert in model.experts[::2]:
        expert.up.weight.data = expert.up.weight.data.t().contiguous().t()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "float": lambda model: model.float(),
    "to and back": lambda model: model.half().double(),
    "assign": lambda model: model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()}, assign=True),
    "load": lambda model: model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()}),
    "another parameter": lambda model: setattr(
        model.experts[3].up, "weight", nn.Parameter(2 * model.gate.weight.new_ones(WIDTH, D))
    ),
    "a flat buffer": flat,
    "shared": share,
    "tied": tie,
    "swapped": swap,
    "not contiguous": turn,
    "shared memory": lambda model: model.share_memory(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_changes_of_parameters_are_seen(change, caplog):
    own, made, x = pair()
    made(x)
    for model in (own, made):
        change(model)
    places = [parameter.data_ptr() for parameter in made.parameters()]
    assert_trains_alike(own, made, x.to(next(own.parameters()).dtype))
    assert [parameter.data_ptr() for parameter in made.parameters()] == places
    assert "original forward" not in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.experts[3].up.weight, "data", torch.zeros(WIDTH, D)),
        lambda model: model.experts[3].__setattr__("up", nn.Linear(D, WIDTH, bias=False)),
        lambda model: setattr(model.experts[3].up, "weight", nn.Parameter(model.experts[3].up.weight.data[:, :4])),
    ],
)
def test_experts_that_are_no_longer_alike_are_left_to_the_original(change):
    own, made, x = pair()
    for model in (own, made):
        change(model)
    outcomes = []
    for model in (own, made):
        try:
            outcomes.append(model(x))
        except RuntimeError as error:
            outcomes.append(str(error))
    assert made.report.blocks[0].calls.rewritten == 0
    torch.testing.assert_close(*outcomes) if isinstance(outcomes[0], Tensor) else None
    assert type(outcomes[0]) is type(outcomes[1])


def _without(model: Loop, gone: int) -> None:
    del model.experts[gone]
    model.gate.weight = nn.Parameter(torch.cat([model.gate.weight[:gone], model.gate.weight[gone + 1 :]]).detach())


def _with_another(model: Loop) -> None:
    model.experts.append(copy.deepcopy(model.experts[1]))
    model.gate.weight = nn.Parameter(torch.cat([model.gate.weight, 2 * model.gate.weight[:1]]).detach())


def _with_biases(model: Loop) -> None:
    for expert in model.experts:
        expert.up.bias = nn.Parameter(torch.ones(WIDTH).double())


CHANGES: dict[str, tuple[Callable[[Loop], None], int]] = {
    "the last is taken out": (lambda model: _without(model, len(model.experts) - 1), -1),
    "one is taken out": (lambda model: _without(model, 4), -1),
    "one is added": (_with_another, 1),
    "they get biases": (_with_biases, 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_experts_that_change_are_listed_anew(change: str) -> None:
    """As often as it happens; and the report says how many there are."""
    own, made, x = pair()
    for times in range(1, 3):
        made(x)
        for model in (own, made):
            CHANGES[change][0](model)
        assert_trains_alike(own, made, x)
        assert made.report.blocks[0].num_experts == E + times * CHANGES[change][1]
        assert made.report.blocks[0].calls.kinds == 1


def of_all(model: nn.Module) -> dict[str, int]:
    """Sizes of what a user saves or copies."""

    def size(value: Any) -> int:
        torch.save(value, file := io.BytesIO())
        return file.tell()

    copies = [copy.deepcopy(parameter.data) for parameter in model.parameters()]
    return {
        "file of one expert": size(dict(model.experts[3].named_parameters())),  # type: ignore[index]
        "file of its state": size(model.experts[3].state_dict()),  # type: ignore[index]
        "pickle of a parameter": len(pickle.dumps(next(model.parameters()))),
        "copies": sum({c.untyped_storage().data_ptr(): c.untyped_storage().nbytes() for c in copies}.values()),
    }


def test_files_and_copies_are_those_of_own_code():
    own, made, x = pair()
    made(x).sum().backward()
    assert of_all(made) == of_all(own)


@pytest.mark.filterwarnings("error")
def test_other_libraries_save_every_expert(tmp_path):
    accelerate, safetensors = pytest.importorskip("accelerate"), pytest.importorskip("safetensors.torch")
    _, made, x = pair()
    made(x)
    accelerate.Accelerator(cpu=True).save_model(made, tmp_path)
    safetensors.save_model(made, str(tmp_path / "other"))
    for file in ("model.safetensors", "other"):
        found = safetensors.load_file(tmp_path / file)
        assert {name: value.tolist() for name, value in found.items()} == {
            name: parameter.tolist() for name, parameter in made.named_parameters()
        }


def test_a_pruned_expert_frees_its_memory_alone():
    own, made, x = pair()
    made(x)
    pruned, made.experts[3] = made.experts[3], copy.deepcopy(made.experts[3])
    for parameter in pruned.parameters():
        parameter.untyped_storage().resize_(0)
    torch.testing.assert_close(made(x), own(x))


def test_what_is_kept_for_backward_is_what_the_report_says():
    _, made, x = pair()
    parameters, kept = {p.untyped_storage().data_ptr() for p in made.parameters()}, {}

    def keep(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in parameters:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes(), t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = made(x)
    assert sum(size for size, _ in kept.values()) == made.report.blocks[0].costs.after.saved
    del y


def test_two_first_calls_of_a_copy():
    own, made, _ = pair()
    xs = [torch.randn(9, D, dtype=torch.float64) for _ in range(2)]
    expected = [own(x) for x in xs]
    for _ in range(20):
        copied, start = copy.deepcopy(made), Barrier(2)

        def call(x: Tensor, copied: nn.Module = copied, start: Barrier = start) -> Tensor:
            start.wait()
            return copied(x)

        with ThreadPoolExecutor(2) as pool:
            torch.testing.assert_close(list(pool.map(call, xs)), expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_main_grad(bias, checkpointed):
    """Of some parameters; others have their gradient in grad."""
    own, made, x = pair(bias=bias)
    for name, parameter in made.named_parameters():
        if "experts" in name and "3" not in name:
            parameter.main_grad = torch.ones_like(parameter)
    own(x).square().sum().backward()
    (checkpoint(made, x, use_reentrant=False) if checkpointed else made(x)).square().sum().backward()
    for (name, one), two in zip(own.named_parameters(), made.named_parameters()):
        parameter = two[1]
        assert hasattr(parameter, "main_grad") == (parameter.grad is None), name
        found = parameter.main_grad - 1 if hasattr(parameter, "main_grad") else parameter.grad
        torch.testing.assert_close(found, one.grad)


def test_a_main_grad_of_another_dtype_is_added_to_afterwards():
    own, made, x = pair(dtype=torch.bfloat16)
    for parameter in made.experts.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float64)
    own(x).sum().backward()
    made(x).sum().backward()
    for one, two in zip(own.experts.parameters(), made.experts.parameters()):
        assert two.grad is None
        torch.testing.assert_close(two.main_grad.bfloat16(), one.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("option", ["recompute_h", "batch_invariant"])
def test_options(option):
    own, x = Loop(Gated, True).double(), torch.randn(TOKENS, D, dtype=torch.float64)
    config = HexaConfig(verify=False, own_code_when_small=False, **{option: True})
    made = hexa_fx.optimize_(copy.deepcopy(own), x, config)
    assert_trains_alike(own, made, x)
    if option == "batch_invariant":
        assert torch.equal(made(x)[:5], made(x[:5]))


def test_many_gradients_and_second_derivatives_are_given():
    own, made, x = pair(bias=True)
    results = []
    for model in (own, made):
        given = x.clone().requires_grad_()
        directions = torch.randn(3, TOKENS, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        wanted = [given, *model.experts[3].parameters()]
        many = torch.autograd.grad(model(given), wanted, directions, is_grads_batched=True)
        (first,) = torch.autograd.grad(model(given).square().sum(), given, create_graph=True)
        results.append((*many, *torch.autograd.grad(first.square().sum(), wanted, allow_unused=True)))
    torch.testing.assert_close(*results)


def test_hooks_see_gradients():
    _, made, x = pair()
    seen = []
    made.experts[0].up.weight.register_hook(lambda grad: seen.append(grad.shape))
    made.experts[0].gate.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    made(x).sum().backward()
    assert seen == 2 * [(WIDTH, D)]


def test_undone_nothing_is_left_of_it():
    own, made, x = pair()
    hexa_fx.undo_(made)
    assert b"hexa_fx" not in pickle.dumps(made)
    torch.testing.assert_close(made(x), own(x))
