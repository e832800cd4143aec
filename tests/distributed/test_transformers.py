"""Unmodified transformers models, exported and scheduled as one graph. test_optimize.py has their layers one by one."""

import threading

import pytest
import torch
from harness import run
from models import cut, largest
from torch._subclasses.fake_tensor import FakeTensor

from hexa_fx.distributed.collectives import all_gather_v
from hexa_fx.distributed.gradients import sync_gradients, weighted_loss
from hexa_fx.passes.partition.apply import Wanted, apply_partition
from hexa_fx.passes.partition.plan_layers import PartitionConfig

pytest.importorskip("transformers")


def build(name):
    import transformers as hf

    common = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "num_experts_per_tok": 2,
        "attn_implementation": "eager",
    }
    if name == "mixtral":
        config = hf.MixtralConfig(intermediate_size=24, num_local_experts=4, **common)
        kind = hf.MixtralForCausalLM
    else:
        config = hf.Qwen3MoeConfig(moe_intermediate_size=24, num_experts=4, head_dim=8, norm_topk_prob=True, **common)
        kind = hf.Qwen3MoeForCausalLM
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return kind(config).double()


def optimized(model, ids, **kwargs):
    from hexa_fx.analysis import analyse_model
    from hexa_fx.config import HexaConfig
    from hexa_fx.inspection.inspector import Inspector

    blocks = [*analyse_model(model, {"input_ids": ids}, HexaConfig(), Inspector(), spread=True).forms.values()]
    assert len(blocks) == 2
    plan = kwargs.pop("plan", None)
    return apply_partition(model, blocks, Wanted(**kwargs), plan)


def loss_of(model, ids):
    logits = model(input_ids=ids).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def exported(rank, world, slots, strategy):
    """The optimized model as one graph, from torch.export, each rank with its own batch size."""
    import hexa_fx
    from hexa_fx.distributed import nodes
    from hexa_fx.passes.partition.apply import apply_to_graph_module

    model, whole = build("mixtral"), build("mixtral")
    ids = torch.randint(0, 40, (5, 6), generator=torch.Generator().manual_seed(1))
    sizes = (3, 2)
    mine = ids.split(sizes)[rank]
    optimized = hexa_fx.optimize(model, {"input_ids": ids})
    with torch._export.config.patch(
        error_on_lifted_constant_tensors=False
    ):  # its error does not say of which operation
        program = torch.export.export(optimized, (), {"input_ids": mine, "use_cache": False}, strict=False)
    untraced = [name for name, value in program.constants.items() if isinstance(value, FakeTensor)]
    assert not untraced, f"{untraced} were not traced, with {threading.enumerate()} and\n{optimized.report}\n{program}"
    module = program.module()
    config = PartitionConfig(batch=5, tile=4, slots=slots)
    installed = apply_to_graph_module(module, Wanted(None, strategy, (2.0, 3.0), config))
    session = installed.session
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    attention = [i for node, i in order.items() if node.op == "call_function" and "matmul" in str(node.target)]
    starts = [i for node, i in order.items() if node.target in (nodes.cache_prefetch, all_gather_v)]
    cross_entropy = torch.nn.functional.cross_entropy
    for _ in range(2):
        logits = module(input_ids=mine, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        weighted_loss(session, loss, len(mine)).backward()
        loss_of(whole, ids).backward()
    sync_gradients(module, session)
    names = dict(whole.named_parameters())
    pairs = [(p.grad, cut(session, name, names[name].grad)) for name, p in module.named_parameters()]
    early, path = starts[0] < attention[0], installed.schedules[0].critical_path
    return largest(pairs), session.plan.batch, len(pairs), early, path


@pytest.mark.parametrize(
    ("slots", "strategy"), [(2, "data"), pytest.param(1, "data", marks=pytest.mark.slow), (1, "model")]
)
def test_exported_model_is_scheduled_as_a_whole(slots, strategy):
    for worst, sizes, compared, early, path in run(2, exported, slots, strategy, timeout=60):
        assert sizes == (3, 2)
        assert worst < 1e-8  # transformers' norms compute in float32
        assert compared > 20
        assert path
        assert early or strategy != "data"  # before the first attention


def unforeseen(rank, world):
    from hexa_fx.errors import PlanError

    model = build("mixtral")
    ids = torch.arange(12).view(2, 6)
    session = optimized(model, ids, strategy="data", capacities=None)
    experts = model.get_submodule(session.plan.layers[0].path)
    experts.forward.specialisations = ()
    experts.forward._latest = None
    model.train()
    try:
        model(input_ids=ids)
    except PlanError as error:
        return str(error)
    return "ran"


def test_a_cut_block_never_runs_its_original_forward():
    assert all("original forward cannot run" in text for text in run(2, unforeseen))
