"""Routing recorded and replayed: equal to the original with the same ids forced on its router, in outputs and all gradients."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import hexa_fx
from hexa_fx import HexaConfig, RoutingLog
from hexa_fx.errors import InputError
from hexa_fx.integrations.tiny_models import built, default_config, tiny_config
from hexa_fx.ir import Small
from hexa_fx.runtime.forward import HexaForward
from hexa_fx.runtime.guards import GuardMiss
from tests.zoo.common import MLP, Looped

CONFIG = HexaConfig(own_code_when_small=False)


class ForcedTopk(TorchFunctionMode):
    """top-k of k among E gives the next ids of a list; the values are those of its input there."""

    def __init__(self, experts, ids, groups=None):
        super().__init__()
        self.experts, self.ids, self.groups = experts, list(ids), groups

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "topk":
            return func(*args, **kwargs)
        k, scores = kwargs.get("k", args[1] if len(args) > 1 else None), args[0]
        if scores.shape[-1] == self.groups and self.groups != k:
            chosen = nn.functional.one_hot(self.ids[0].long() // (self.experts // self.groups), self.groups).amax(1)
            index = (chosen * 1e6 + scores.detach()).topk(k)[1]
            return torch.return_types.topk((scores.gather(-1, index), index))
        if scores.shape[-1] != self.experts or scores.dim() != 2:
            return func(*args, **kwargs)
        index = self.ids.pop(0).long()
        return torch.return_types.topk((scores.gather(-1, index), index))


def model_of(name):
    config = tiny_config(default_config(name))
    if name.startswith("deepseek"):
        config.n_group, config.topk_group = 4, 2
        config.topk_method = "group_limited_greedy"
        config.num_hidden_layers = 5
    if name == "qwen3_moe":
        config.norm_topk_prob = True
    config._experts_implementation = "eager"  # grouped products know no float64
    model, inputs = built(config, name)
    return model.double(), inputs


def optimized_of(name):
    model, inputs = model_of(name)
    return model, hexa_fx.optimize(copy.deepcopy(model), inputs, CONFIG), inputs["input_ids"]


def random_log(like: RoutingLog, tokens, seed=0):
    """Other ids than any router would choose, within what a choice among groups allows."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(like.tokens, generator=generator)[:tokens]
    return RoutingLog(like.ids[order], None, like.num_experts)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_gradients(model, other):
    expected, found = gradients(model), gradients(other)
    assert expected.keys() <= found.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected.get(name, torch.zeros_like(gradient)), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "deepseek_v2", "gpt_oss", "llama4_text"])
def test_replayed_outputs_and_gradients_are_the_originals_with_forced_ids(name):
    original, optimized, ids = optimized_of(name)
    with torch.no_grad(), hexa_fx.record_routing(optimized) as natural:
        optimized(ids)
    assert natural.ids.dtype == torch.uint8
    assert natural.lengths == (16, 16)
    log = random_log(natural, 32)
    experts = natural.num_experts[0]
    forced = [log.ids[:, layer] for layer in range(log.ids.shape[1])]
    groups = 4 if name.startswith("deepseek") else None
    for model in (original, optimized):
        model.train()
    mode = ForcedTopk(experts, forced, groups)
    with mode:
        expected = original(ids).logits
    assert not mode.ids
    expected.square().sum().backward()
    with hexa_fx.replay_routing(optimized, log):
        found = optimized(ids).logits
        found.square().sum().backward()
    torch.testing.assert_close(found, expected)
    assert_same_gradients(original, optimized)
    assert not torch.allclose(optimized(ids).logits, found), "the forced routing is not the router's own"


def test_a_sixteen_bit_model_as_it_is_loaded():
    """Grouped products are recorded for the layout of their ids, which forced ids have to have."""
    model, inputs = built(tiny_config(default_config("qwen3_moe")), "qwen3_moe")
    model = hexa_fx.optimize_(model.bfloat16(), inputs, CONFIG)
    with torch.no_grad():
        with hexa_fx.record_routing(model) as natural:
            model(**inputs)
        log = random_log(natural, natural.tokens)
        with hexa_fx.replay_routing(model, log), hexa_fx.record_routing(model) as seen:
            model(**inputs)
    assert torch.equal(seen.ids, log.ids)


@pytest.fixture(scope="module")
def qwen():
    _, model, _ = optimized_of("qwen3_moe")
    return model, torch.randint(3, 100, (6, 10), generator=torch.Generator().manual_seed(1))


def test_a_replay_in_other_batches_routes_alike(qwen):
    model, ids = qwen
    with torch.no_grad(), hexa_fx.record_routing(model) as log:
        model(ids)
    changed = random_log(log, log.tokens)
    changed = RoutingLog(changed.ids, log.lengths, log.num_experts)
    with torch.no_grad():
        with hexa_fx.replay_routing(model, changed):
            whole = model(ids).logits
        for sizes in ([1, 5], [2, 2, 2], [3, 1, 1, 1]):
            with hexa_fx.replay_routing(model, changed), hexa_fx.record_routing(model) as seen:
                parts = [model(piece).logits for piece in ids.split(sizes)]
            assert seen == changed
            torch.testing.assert_close(torch.cat(parts), whole)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_left_out_and_goes_where_the_router_sends_it(qwen, side):
    model, ids = qwen
    lengths = [10, 3, 7, 1, 10, 5]
    mask = torch.arange(10)[None, :] < torch.tensor(lengths)[:, None]
    mask = (mask if side == "right" else mask.flip(1)).long()
    with torch.no_grad():
        with hexa_fx.record_routing(model) as log:
            model(input_ids=ids, attention_mask=mask)
        assert log.lengths == tuple(lengths)
        assert log.tokens == sum(lengths)
        changed = RoutingLog(random_log(log, log.tokens).ids, lengths, log.num_experts)
        with hexa_fx.replay_routing(model, changed), hexa_fx.record_routing(model) as seen:
            padded = model(input_ids=ids, attention_mask=mask).logits
        assert seen == changed
        for row, length in enumerate(lengths):
            own = ids[row : row + 1, :length] if side == "right" else ids[row : row + 1, 10 - length :]
            with hexa_fx.replay_routing(model, changed.select([row])):
                alone = model(own).logits[0]
            found = padded[row, :length] if side == "right" else padded[row, 10 - length :]
            torch.testing.assert_close(found, alone)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_computes_again_with_the_same_ids(reentrant):
    _, optimized, _ = optimized_of("qwen3_moe")
    ids = torch.randint(3, 100, (4, 10), generator=torch.Generator().manual_seed(1))
    optimized.train()
    with torch.no_grad(), hexa_fx.record_routing(optimized) as natural:
        optimized(ids)
    log = RoutingLog(random_log(natural, natural.tokens).ids, natural.lengths, natural.num_experts)

    def run(order):
        optimized.zero_grad()
        with hexa_fx.replay_routing(optimized, log), hexa_fx.record_routing(optimized) as seen:
            losses = [optimized(piece).logits.square().sum() for piece in ids.split(2)]
            for number in order:
                losses[number].backward()
        assert seen == log
        return {name: gradient.clone() for name, gradient in gradients(optimized).items()}

    expected = run([0, 1])
    optimized.enable_input_require_grads()
    optimized.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for order in ([0, 1], [1, 0]):  # backward of either call computes its own forward again
        found = run(order)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name])


def test_backward_outside_the_context_of_a_checkpointed_forward_is_as_it_was_before():
    """Without a context, a recomputation routes by itself; inside another one it is an error and not a wrong gradient."""
    _, optimized, ids = optimized_of("qwen3_moe")
    optimized.train()
    optimized.gradient_checkpointing_enable()
    loss = optimized(ids).logits.sum()
    with torch.no_grad(), hexa_fx.record_routing(optimized) as log:
        optimized(ids)
    with hexa_fx.replay_routing(optimized, log), pytest.raises(InputError, match="backward inside the context"):
        loss.backward()


def test_generation_is_joined_by_sequence_and_replayed_in_training(qwen):
    model, ids = qwen
    with hexa_fx.record_routing(model) as pieces:
        tokens = model.generate(ids[:3], max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    with pytest.raises(InputError, match="not those of 6 sequences; calls left 3 each"):  # as of num_return_sequences=2
        pieces.joined(6)
    log = pieces.joined(3)
    assert log.lengths == (13, 13, 13)  # the last token was never run
    samples = [log.select([row]).ids for row in range(3)]
    log = RoutingLog.of_sequences(samples, [14, 14, 14], num_experts=log.num_experts)
    with torch.no_grad(), hexa_fx.replay_routing(model, log), hexa_fx.record_routing(model) as seen:
        model(tokens)
    known = ~log.live
    assert int(log.live.sum()) == 3
    assert torch.equal(seen.ids[known], log.ids[known])
    assert model.training is False


def test_a_log_that_does_not_fit_is_an_error_before_anything_runs(qwen):
    model, ids = qwen
    with torch.no_grad(), hexa_fx.record_routing(model) as log:
        model(ids)
    ran = []
    handle = model.model.embed_tokens.register_forward_hook(lambda *_: ran.append(1))
    wrong = {
        "layers": RoutingLog(log.ids[:, :1], log.lengths),
        "takes 2 experts": RoutingLog(log.ids[:, :, :1], log.lengths),
        "names expert 8": RoutingLog(torch.full_like(log.ids, 8), log.lengths),
        "is of 9 experts": RoutingLog(log.ids, log.lengths, 9),
        "token 0 to expert 0 of .* more than once": RoutingLog(torch.zeros_like(log.ids), log.lengths),
        "RoutingLog.load": "log.npz",
    }
    for message, other in wrong.items():
        with pytest.raises(InputError, match=message), hexa_fx.replay_routing(model, other):
            model(ids)
    with hexa_fx.replay_routing(model, log.select([0, 1])), pytest.raises(InputError, match="20 left of 20"):
        model(ids)
    with hexa_fx.replay_routing(model, log), pytest.raises(InputError, match="do not end where"):
        model(ids.reshape(10, 6))
    for lengths in ([30, 30], [10, 10, 40]):  # of which a call of shorter rows takes a part
        with (
            hexa_fx.replay_routing(model, RoutingLog(log.ids, lengths)),
            pytest.raises(InputError, match="do not end where"),
        ):
            model(ids[:3])
    with pytest.raises(InputError, match="without a tensor"), hexa_fx.replay_routing(model, log):
        model(use_cache=False)
    handle.remove()
    assert not ran
    with hexa_fx.replay_routing(model, log):
        model(ids)


def test_tokens_that_are_left_over_are_reported(qwen, caplog):
    model, ids = qwen
    with torch.no_grad(), hexa_fx.record_routing(model) as log:
        model(ids)
    with caplog.at_level(logging.WARNING), torch.no_grad(), hexa_fx.replay_routing(model, log):
        model(ids[:2])
    assert "40 of the log's 60 tokens were not replayed" in caplog.text


def test_logs_are_read_as_any_array_holds_them(tmp_path):
    numpy = pytest.importorskip("numpy")
    ids = numpy.arange(24).reshape(3, 2, 4)
    expected = RoutingLog(ids)
    for other in (ids.astype("uint16"), ids.astype("uint64"), ids.astype(">i4"), ids[::-1].copy()[::-1], ids.tolist()):
        assert RoutingLog(other) == expected
    for entries in ({"lengths": 3}, {"top_k": 4, "num_experts": 24}, {"layers": numpy.array([b"a", b"b"])}):
        numpy.savez(tmp_path / "log.npz", routed_experts=ids, **entries)
        assert RoutingLog.load(tmp_path / "log.npz") == expected
    unknown = numpy.where(numpy.arange(3)[:, None, None] == 1, -1, ids)
    assert RoutingLog(unknown, live=[False, True, False], num_experts=24).ids[1].eq(0).all()
    assert RoutingLog(unknown, live=[False, True, False]) != RoutingLog(numpy.maximum(unknown, 0))
    (tmp_path / "text.npz").write_text("no archive")
    wrong = {
        "integer ids; got bool": lambda: RoutingLog(ids > 2),
        "integer ids; got object": lambda: RoutingLog(None),
        "more than 32 bits": lambda: RoutingLog(ids + 2**40),
        "lengths are whole numbers": lambda: RoutingLog(ids, [1.0, 2.0]),
        "no sequence 1; it holds 1": lambda: expected.select([1]),
        "none negative": lambda: expected.truncated([-1]),
        "no NumPy archive": lambda: RoutingLog.load(tmp_path / "text.npz"),
    }
    for message, make in wrong.items():
        with pytest.raises(InputError, match=message):
            make()


def test_a_log_is_saved_loaded_and_written_by_others(qwen, tmp_path):
    numpy = pytest.importorskip("numpy")
    model, ids = qwen
    with torch.no_grad(), hexa_fx.record_routing(model) as log:
        model(ids)
    log.save(tmp_path / "log.npz")
    loaded = RoutingLog.load(tmp_path / "log.npz")
    assert loaded == log
    assert (loaded.num_experts, loaded.layers) == (log.num_experts, log.layers)
    assert loaded.ids.dtype == torch.uint8
    numpy.savez(tmp_path / "bare.npz", routed_experts=log.ids.numpy().astype("int32"))
    bare = RoutingLog.load(tmp_path / "bare.npz")
    assert bare.ids.dtype == torch.uint8
    assert bare.lengths == (60,)
    with torch.no_grad(), hexa_fx.replay_routing(model, bare):
        model(ids)
    numpy.savez(tmp_path / "other.npz", ids=log.ids.numpy())
    with pytest.raises(InputError, match="routed_experts"):
        RoutingLog.load(tmp_path / "other.npz")


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_of_a_checkpointed_forward_after_its_replay_is_an_error(reentrant):
    _, optimized, ids = optimized_of("qwen3_moe")
    optimized.train()
    optimized.enable_input_require_grads()
    optimized.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with hexa_fx.record_routing(optimized) as log:
        optimized(ids).logits.sum().backward()
    with hexa_fx.replay_routing(optimized, log):
        loss = optimized(ids).logits.sum()
    with pytest.raises(InputError, match="run backward inside the context"):
        loss.backward()
    optimized(ids).logits.sum().backward()


def test_contexts_in_each_other_and_a_call_that_failed(qwen):
    """What is recorded is where tokens go, whichever context is the outer one; a call that failed has replayed nothing."""
    model, ids = qwen
    with torch.no_grad(), hexa_fx.record_routing(model) as own:
        model(ids)
    other = RoutingLog((own.ids + 1) % 8, own.lengths)
    record, replay = hexa_fx.record_routing, hexa_fx.replay_routing
    with torch.no_grad(), record(model) as outer, replay(model, other), record(model) as inner:
        handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids)
        handle.remove()
        model(ids)
    assert inner == outer
    assert inner == other


def test_nothing_is_left_after_a_context(qwen):
    model, ids = qwen
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]

    def stop(*_):
        raise RuntimeError("stop")

    handle = model.model.layers[1].mlp.register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="stop"), hexa_fx.record_routing(model) as log:
        model(ids)
    handle.remove()
    assert log.tokens == 0
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert torch._C._len_torch_function_stack() == 0
    with torch.no_grad(), hexa_fx.record_routing(model) as log:
        model(ids)
    assert log.tokens == 60


class Block(Looped):
    """A block with its own router, on (T, D) rows."""

    def __init__(self, choose):
        super().__init__(lambda: MLP(8, 6, act=nn.ReLU), 8)
        self.choose = choose

    def route(self, flat):
        index, weights = self.choose(self.router(flat))
        return weights, index


def by_topk(logits):
    weights, index = logits.softmax(-1).topk(2)
    return index, weights


def by_sort(logits):
    values, order = logits.softmax(-1).sort(-1, descending=True)
    return order[:, :2], values[:, :2]


def by_argsort(logits):
    order = logits.argsort(-1)[:, -2:].flip(1)
    return order, logits.softmax(-1).gather(1, order)


def by_two_choices(logits):
    scores = logits.softmax(-1)
    first = scores.argmax(-1)
    rest = scores.masked_fill(nn.functional.one_hot(first, 4).bool(), float("-inf"))
    second = rest.argmax(-1)
    index = torch.stack([first, second], 1)
    return index, scores.gather(1, index)


def by_max(logits):
    values, index = logits.softmax(-1).max(-1, keepdim=True)
    return index, values


@pytest.mark.parametrize("choose", [by_topk, by_sort, by_argsort, by_two_choices, by_max])
@pytest.mark.parametrize("training", [False, True])
def test_any_choice_among_scores_is_replayed(choose, training):
    block = Block(choose).double().train(training)
    x = torch.randn(12, 8, dtype=torch.float64)
    optimized = hexa_fx.optimize(block, x, CONFIG)
    with hexa_fx.record_routing(optimized) as log:
        optimized(x)
    assert torch.equal(log.ids[:, 0].long(), choose(block.router(x))[0])
    k = log.top_k[0]
    ids = torch.rand(12, 4).argsort(1)[:, :k]
    gate = block.router(x).softmax(-1).gather(1, ids)
    each = torch.stack([expert(x) for expert in block.experts], 1)
    expected = (each.gather(1, ids[:, :, None].expand(-1, -1, 8)) * gate[:, :, None]).sum(1)
    wanted = torch.autograd.grad(expected.square().sum(), list(block.parameters()))
    for split in ([12], [5, 0, 7]):
        with hexa_fx.replay_routing(optimized, RoutingLog(ids[:, None])):
            found = torch.cat([optimized(piece) for piece in x.split(split)])
        torch.testing.assert_close(found, expected)
        for gradient, other in zip(torch.autograd.grad(found.square().sum(), list(optimized.parameters())), wanted):
            torch.testing.assert_close(gradient, other)


def test_a_block_in_its_own_code_is_replayed_too():
    block = Block(by_topk).eval()
    x = torch.randn(12, 8)
    optimized = hexa_fx.optimize(block, x)
    forward = optimized.__dict__["forward"]
    assert isinstance(forward, HexaForward)
    forward.specialisations[0].small = Small(1000, 1000)
    ids = torch.rand(12, 4).argsort(1)[:, :2]
    with hexa_fx.replay_routing(optimized, RoutingLog(ids[:, None])), hexa_fx.record_routing(optimized) as seen:
        optimized(x)
    assert torch.equal(seen.ids[:, 0].long(), ids)


def test_a_forward_that_falls_back_after_its_router_ran_is_replayed():
    x = torch.randn(12, 8)
    optimized = hexa_fx.optimize(Block(by_topk).eval(), x, CONFIG)
    forward = optimized.__dict__["forward"]
    (made,), ran = forward.specialisations, []
    program = made.program

    def failing(*args):
        ran.append(program.function(*args))
        raise GuardMiss("expected something else")

    made.program = SimpleNamespace(function=failing, inputs=program.inputs, path="")
    forward.analyst = None
    ids = torch.rand(12, 4).argsort(1)[:, :2]
    with hexa_fx.replay_routing(optimized, RoutingLog(ids[:, None])), hexa_fx.record_routing(optimized) as seen:
        found = optimized(x)
    assert torch.equal(seen.ids[:, 0].long(), ids)
    torch.testing.assert_close(found, ran[0])


def test_a_router_that_is_no_choice_among_scores_is_refused_before_anything_runs():
    def hashed(logits):
        index = nn.functional.one_hot((logits.detach().abs() * 1000).long()[:, :1] % 4, 4).argmax(-1)
        return index, logits.softmax(-1).gather(1, index)

    torch.manual_seed(0)
    x = torch.randn(12, 8)
    optimized = hexa_fx.optimize(Block(hashed).eval(), x, CONFIG)
    assert optimized.report.rewritten
    with pytest.raises(InputError, match="no top-k, argmax"), hexa_fx.record_routing(optimized):
        pytest.fail("the context was entered")
    with pytest.raises(InputError, match=r"call hexa_fx\.optimize before"), hexa_fx.record_routing(nn.Linear(2, 2)):
        pytest.fail("the context was entered")
