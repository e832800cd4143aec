"""The check that all ranks hold the same plan."""

from __future__ import annotations

import json

import torch.distributed as dist

from hexa_fx.distributed.collective_errors import join
from hexa_fx.distributed.groups import Groups
from hexa_fx.errors import PlanError
from hexa_fx.plan import Plan


def check_same_plan(plan: Plan, groups: Groups) -> None:
    """Raises on every rank, before any step: `RankError` when a rank is missing, `PlanError` when one holds another plan."""
    if plan.world != groups.world:
        raise PlanError(f"the plan is for {plan.world} ranks, the mesh has {groups.world}: plan again or load by file")
    join(groups, "before the plans were compared")
    texts: list[str] = [""] * groups.world
    dist.all_gather_object(texts, plan.to_json(), group=groups.host)
    if len(set(texts)) == 1:
        return
    plans = [Plan.from_json(text) for text in texts]
    prints = {rank: other.fingerprint for rank, other in enumerate(plans)}
    other = next(rank for rank, text in enumerate(texts) if text != texts[0])
    raise PlanError(
        f"ranks hold different plans, fingerprints {prints}; rank 0 and rank {other} differ in "
        f"{_first_difference(texts[0], texts[other])}. Plan on one rank and broadcast it (partition_model does)"
    )


def _first_difference(left: str, right: str) -> str:
    a, b = json.loads(left), json.loads(right)
    keys = [key for key in a if a[key] != b.get(key)]
    return "; ".join(f"{key}: {a[key]!r} and {b.get(key)!r}"[:400] for key in keys[:3])
