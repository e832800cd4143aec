"""A model that is spread over devices: its plan, its exchanges and its graph with collectives can be seen too."""

from dataclasses import replace

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hexa_fx
from hexa_fx.plan import ExpertShape, LayerPlan, Plan
from hexa_fx.report import with_plan


@pytest.fixture
def spread(models, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        yield hexa_fx.optimize_(models.make(), models.INPUT, mesh=mesh, strategy="model", capacities=None)
    finally:
        dist.destroy_process_group()


def test_plan_exchanges_and_graph(spread, tmp_path):
    report = spread.report
    assert report.plan == spread.partition.plan
    for block in report.blocks:
        assert block.collectives
    assert "exchanges: " in str(report)
    assert report.plan.fingerprint in str(report)
    assert "own code" not in str(report)  # which needs whole weights
    graphs = spread.graphs["layers.1"]
    names = [stage.name for stage in graphs.stages]
    assert names[:3] == ["capture", "rewrite", "partition"]
    roles = {node.op: node.role for node in graphs.stage("partition").graph.nodes}
    assert all(roles[op] == "collective" for op in report.blocks[1].collectives)
    assert 'data-role="collective"' in graphs.to_svg("partition")
    text = spread.graphs.to_html(tmp_path / "graphs.html", 90).read_text(encoding="utf-8")
    assert text.count('<template data-block="0"') == len(names)
    assert '<template data-block="1"' not in text  # identical blocks once


def test_costs_are_said_to_be_of_the_whole_block(models, tmp_path):
    model = hexa_fx.optimize(models.make(), models.INPUT)
    cut = ("all_gather_v", "all_gather_v", "wait", "reduce_scatter_v")
    shape = ExpertShape(4, 8, 12)
    plan = Plan(2, (LayerPlan("layers.0", "model_centric", shape, (8, 4)),), batch=(2, 1))
    report = with_plan(model.report, plan, {})
    report = replace(report, found=(replace(report.blocks[0], collectives=cut), *report.blocks[1:]))
    page = report.to_html(tmp_path / "report.html").read_text(encoding="utf-8")
    for text in (str(report), page):
        assert "(before it was spread over 2 devices)" in text
        assert "exchanges: 2 times all_gather_v, reduce_scatter_v" in text
        assert (
            "layers.0: model-centric (tokens travel, reduce_scatter), channels of every expert by rank h_i [8, 4]"
            in text
        )
    assert [block.devices for block in report.blocks] == [2, 1]
