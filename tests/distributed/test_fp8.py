"""Blocks that multiply in FP8 and are spread over devices: a step against one process in float32."""

import pytest
import torch
from harness import run
from models import cut
from test_optimize import MIXED, mesh_of
from test_transformers import build, loss_of

import hexa_fx
from hexa_fx.distributed.data import split_batch
from hexa_fx.distributed.gradients import sync_gradients, weighted_loss
from hexa_fx.distributed.groups import local_part
from hexa_fx.ops import fp8_weights
from hexa_fx.passes.partition.plan_layers import PartitionConfig

pytest.importorskip("transformers")


def one_step(rank, world):
    """Cosines of all gradients with those of one process, and the layers whose quantised weights are kept."""
    model, whole = build("qwen3").float(), build("qwen3").float()
    ids = torch.randint(0, 40, (5, 6), generator=torch.Generator().manual_seed(1))
    hexa_fx.optimize_(
        model,
        {"input_ids": ids},
        hexa_fx.HexaConfig(compute="fp8_block"),
        mesh=mesh_of(world),
        strategy=MIXED,
        capacities=(3.0, 1.0),
        partition=PartitionConfig(tile=4),
    )
    session = model.partition
    mine = split_batch(ids, session.plan, rank)
    weighted_loss(session, loss_of(model, mine), len(mine)).backward()
    sync_gradients(model, session)
    loss_of(whole, ids).backward()
    names = dict(whole.named_parameters())
    session.close()
    cosines = {}
    for name, p in model.named_parameters():
        expected = cut(session, name, names[name].grad)
        if p.grad is not None and expected.numel() and expected.norm():
            cosines[name] = torch.nn.functional.cosine_similarity(
                local_part(p.grad).flatten(), expected.flatten(), 0
            ).item()
    kept = len(fp8_weights._copies)
    fp8_weights.clear()
    return cosines, kept, str(model.report)


def test_a_step_has_the_direction_of_one_process():
    for cosines, kept, report in run(2, one_step):
        assert len(cosines) > 10
        assert min(cosines.values()) > 0.99, cosines
        assert min(cosines.values()) < 0.99999  # it was FP8
        assert kept == 2  # both projections of the layer whose weights stay; the other's lie where others lay
        assert "asked to multiply in fp8_block" in report
