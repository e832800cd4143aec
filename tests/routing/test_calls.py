"""Calls of a model while routing is recorded or replayed: which belong to a log, which fail, and which are computed again."""

import copy
import pickle
import threading
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hexa_fx
from hexa_fx import RoutingLog
from hexa_fx.errors import InputError
from hexa_fx.routing.calls import read_call
from tests.routing.test_replay import CONFIG, Block, by_topk, gradients, optimized_of, random_log
from tests.zoo.common import MLP, Mixture, experts


@pytest.fixture(scope="module")
def qwen():
    _, model, _ = optimized_of("qwen3_moe")
    return model, torch.randint(3, 100, (4, 10), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def other(qwen):
    """A log of other ids than the router's."""
    model, ids = qwen
    with torch.no_grad(), hexa_fx.record_routing(model) as log:
        model(ids)
    return RoutingLog(random_log(log, log.tokens).ids, log.lengths, log.num_experts)


def test_padding_is_left_out_of_generation_with_a_static_cache(qwen):
    model, ids = qwen
    mask = (torch.arange(10) >= torch.tensor([[0], [4], [0], [7]])).long()
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    logs = []
    for cache in ("dynamic", "static"):
        with hexa_fx.record_routing(model) as pieces:
            model.generate(ids, attention_mask=mask, cache_implementation=cache, **options)
        logs.append(pieces.joined(4))
    assert logs[1] == logs[0]
    assert logs[0].lengths == (13, 9, 13, 6)


class Attends(nn.Module):
    def forward(self, input_ids, attention_mask=None, **caches):
        raise NotImplementedError


class Cache:
    def get_seq_length(self):
        return 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_queries_and_keys_say_what_is_padding(dtype):
    ids, keys = torch.zeros(2, 3, dtype=torch.long), torch.tensor([[0, 0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0, 0]]).bool()
    seen = torch.ones(3, 7).tril(2).bool() & keys[:, None, None]  # two tokens came before, and room is left behind
    mask = seen if dtype == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(dtype).min)
    for given in (mask, {"sliding_attention": mask[..., 2:5], "full_attention": mask}):
        for caches in ({"past_key_values": Cache()}, {"cache": Cache()}):  # its name differs from version to version
            call = read_call(Attends(), (ids,), {"attention_mask": given, **caches})
            assert call.lengths == (2, 3)
            assert call.real.tolist() == [False, True, True, True, True, True]
    assert read_call(Attends(), (ids,), {"attention_mask": mask[:1, :, :, 2:5]}).lengths == (2, 2)
    with pytest.raises(InputError, match="the attention mask is"):
        read_call(Attends(), (ids,), {"attention_mask": mask[:, :, :2]})
    for caches in ({}, {"self_cache": Cache(), "cross_cache": Cache()}):
        with pytest.raises(InputError, match=f"unknown: {len(caches)} arguments are caches"):
            read_call(Attends(), (ids,), {"attention_mask": mask, **caches})


def test_an_expert_that_is_named_twice_is_seen_in_any_place():
    block, x = Block(lambda logits: logits.softmax(-1).topk(3)[::-1]).eval(), torch.randn(12, 8)
    optimized = hexa_fx.optimize(block, x, CONFIG)
    ids = torch.tensor([0, 1, 2]).expand(12, 1, 3).clone()
    ids[5] = torch.tensor([1, 3, 1])
    with pytest.raises(InputError, match="token 5 to expert 1 of"), hexa_fx.replay_routing(optimized, RoutingLog(ids)):
        pass


def test_a_call_that_fails_behind_its_last_router_may_be_tried_again(qwen, other):
    model, ids = qwen
    failures = [RuntimeError("out of memory")]

    def fail(*_):
        if failures:
            raise failures.pop()

    handle = model.lm_head.register_forward_pre_hook(fail)
    with torch.no_grad(), hexa_fx.replay_routing(model, other), hexa_fx.record_routing(model) as seen:
        with pytest.raises(RuntimeError, match="out of memory"):
            model(ids)
        try:
            raise KeyError
        except KeyError:  # an error that is being handled is none of the call's
            model(ids)
    handle.remove()
    assert seen == other


def test_nothing_is_left_where_a_call_is_interrupted(qwen, other):
    model, ids = qwen

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[1].mlp.experts.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), torch.no_grad(), hexa_fx.replay_routing(model, other):
        model(ids)
    handle.remove()
    assert not _get_current_function_mode_stack()


def test_two_threads_at_once_are_an_error_and_one_after_the_other_are_not(qwen, other):
    model, ids = qwen
    errors = []

    def call(piece):
        try:
            with torch.no_grad():
                model(piece)
        except InputError as error:
            errors.append(str(error))

    def in_another_thread(piece):
        thread = threading.Thread(target=call, args=(piece,))
        thread.start()
        thread.join()

    with torch.no_grad(), hexa_fx.replay_routing(model, other), hexa_fx.record_routing(model) as seen:
        in_another_thread(ids[:2])
        handle = model.model.layers[1].register_forward_pre_hook(lambda *_: in_another_thread(ids))
        model(ids[2:])
        handle.remove()
    assert seen == other
    assert len(errors) == 1
    assert "two threads call the model at once" in errors[0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_that_is_made_inside_a_context_is_outside_of_it(qwen, other, copied):
    model, ids = qwen
    with torch.no_grad():
        expected = model(ids).logits
        with hexa_fx.replay_routing(model, other):
            made = copied(model)
            torch.testing.assert_close(made(ids).logits, expected)
            model(ids)
        torch.testing.assert_close(made(ids).logits, expected)


class Copied(TorchDispatchMode):
    """Counts what lists of tensors are copied to."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.elements += result.numel() if func is torch.ops.aten.cat.default else 0
        return result


def test_a_log_of_many_calls_copies_each_once():
    """As those of a long generation: what the calls before left is copied in none of them."""
    log, calls = RoutingLog(torch.empty(0, 1, 2, dtype=torch.long), (), 8), torch.randint(8, (100, 4, 1, 2))
    assert [log.joined(2).lengths, log.select([]).lengths, log.truncated([]).lengths] == [(0, 0), (), ()]
    with Copied() as copied:
        for ids in calls:
            log.extend(ids, [1] * 4)
        joined = log.joined(4)
    assert joined.lengths == (100,) * 4
    assert torch.equal(joined.ids.long(), calls.transpose(0, 1).reshape(-1, 1, 2))
    assert copied.elements < 3 * log.ids.numel()


def test_a_log_does_not_follow_the_array_that_it_was_made_of():
    ids = torch.tensor([[[0, 1]]], dtype=torch.uint8)
    log = RoutingLog(ids)
    ids.fill_(9)
    assert log.ids.tolist() == [[[0, 1]]]


class Checkpointed(nn.Module):
    """MoE blocks without the attention between them, in a checkpoint, which may hold a checkpoint of each."""

    def __init__(self, model, outer, inner):
        super().__init__()
        self.embed, self.blocks = model.model.embed_tokens, nn.ModuleList(layer.mlp for layer in model.model.layers)
        self.outer, self.inner = outer, inner

    def forward(self, ids):
        return _perhaps(self.outer, self.stack, self.embed(ids))

    def stack(self, x):
        for block in self.blocks:
            x = x + _perhaps(self.inner, block, x)
        return x


def _perhaps(reentrant, function, x):
    return function(x) if reentrant is None else checkpoint(function, x, use_reentrant=reentrant)


def gradients_of(model, log, calls, order, run):
    model.zero_grad()
    with hexa_fx.replay_routing(model, log):
        losses = [run(piece).square().sum() for piece in calls]
        for number in order:
            losses[number].backward()
    return {name: gradient.clone() for name, gradient in gradients(model).items()}


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("kinds", [(True, None), (True, True), (True, False), (False, True), (False, False)])
def test_checkpoints_in_each_other_belong_to_the_call_of_the_outer_one(qwen, other, kinds, order):
    model, ids = qwen
    plain, nested = Checkpointed(model, None, None), Checkpointed(model, *kinds)
    expected = gradients_of(plain, other, ids.split(2), order, plain)
    for name, gradient in gradients_of(nested, other, ids.split(2), order, nested).items():
        torch.testing.assert_close(gradient, expected[name])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_of_the_whole_call(qwen, other, reentrant):
    model, ids = qwen
    like = torch.ones((), dtype=torch.float64, requires_grad=True)

    def run(piece):
        return checkpoint(lambda one: model.model(piece).last_hidden_state * one, like, use_reentrant=reentrant)

    expected = gradients_of(model, other, ids.split(2), [1, 0], lambda piece: model.model(piece).last_hidden_state)
    with torch.no_grad():
        model(ids)
    for name, gradient in gradients_of(model, other, ids.split(2), [1, 0], run).items():
        torch.testing.assert_close(gradient, expected[name])
    with hexa_fx.replay_routing(model, other):
        loss = run(ids).sum()
    with pytest.raises(InputError, match="ran inside replay_routing"):
        loss.backward()


def test_an_evaluation_after_a_checkpoint_does_not_make_it_part_of_a_replay(qwen, other):
    model, ids = qwen
    rows = model.model.embed_tokens(ids).detach().requires_grad_()
    block = model.model.layers[0].mlp
    loss = checkpoint(block, rows, use_reentrant=True)
    with torch.no_grad(), hexa_fx.replay_routing(model, other):
        model(ids)
    loss.sum().backward()
    assert rows.grad is not None


def test_hooks_that_always_run_do_so_while_routers_are_looked_for():
    """As bitsandbytes has them, which count how deep calls are in each other in torch.nn.utils.parametrize."""
    depth, block = [0], Block(lambda logits: logits.softmax(-1).topk(2)[::-1]).eval()

    def enter(*_):
        depth[0] += 1

    def leave(*_):
        depth[0] -= 1

    block.register_forward_pre_hook(enter)
    block.register_forward_hook(leave, always_call=True)
    optimized = hexa_fx.optimize_(block, torch.randn(12, 8), CONFIG)
    with hexa_fx.record_routing(optimized) as log:
        optimized(torch.randn(5, 8))
    assert log.tokens == 5
    assert depth == [0]


class Routed(Mixture):
    """Experts that are told where tokens go."""

    def __init__(self):
        nn.Module.__init__(self)
        self.experts = experts(MLP, 4, dim=8, hidden=6)

    def forward(self, x, index, weights):
        return self.mix(x, weights, index)


class Around(nn.Module):
    """Routers of two blocks, or one of both."""

    def __init__(self, routers):
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(8, 4) for _ in range(routers))
        self.blocks = nn.ModuleList(Routed() for _ in range(2))

    def forward(self, x):
        chosen = [by_topk(router(x)) for router in self.routers]
        return sum(block(x, *chosen[number % len(chosen)]) for number, block in enumerate(self.blocks))


@pytest.mark.parametrize("routers", [1, 2])
def test_two_blocks_whose_routers_lie_in_one_module(routers):
    x = torch.randn(12, 8)
    model = hexa_fx.optimize_(Around(routers).eval(), x, CONFIG)
    with hexa_fx.record_routing(model) as log:
        model(x)
    chosen = [by_topk(router(x))[0] for router in model.routers]
    assert torch.equal(log.ids.long(), torch.stack([chosen[0], chosen[-1]], 1))
    other = RoutingLog(log.ids.roll(1, 0))
    with hexa_fx.replay_routing(model, other), hexa_fx.record_routing(model) as seen:
        model(x)
    assert torch.equal(seen.ids, other.ids)
    other.ids[:, 1] = other.ids[:, 1].roll(1, 0)
    refused = pytest.raises(InputError, match=r"blocks\.0 and blocks\.1 get the experts of one choice")
    with refused if routers == 1 else nullcontext(), hexa_fx.replay_routing(model, other):
        model(x)


def test_a_call_that_was_compiled_before_a_context_is_an_error_in_it():
    """Compiled code skips hooks that were added since. A replay that has ended leaves nothing that breaks a graph.

    Newer versions of torch run such a call without its compiled code, hooks included.
    """
    torch.compiler.reset()
    model, x = hexa_fx.optimize_(nn.Sequential(Block(by_topk)).eval(), torch.randn(12, 8), CONFIG), torch.randn(5, 8)
    compiled, log = torch.compile(model, backend="eager"), RoutingLog(torch.tensor([[[0, 1]]] * 5))
    compiled(x)
    with hexa_fx.record_routing(model) as own:
        model(x)
    with hexa_fx.replay_routing(model, log):
        replayed = model(x)
    with suppress(InputError), hexa_fx.record_routing(model) as seen:
        compiled(x)
        assert seen == own
    with suppress(InputError), hexa_fx.replay_routing(model, log):
        torch.testing.assert_close(compiled(x), replayed)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))
    torch.compiler.reset()
