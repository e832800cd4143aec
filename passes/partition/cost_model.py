"""The cost of an MoE layer in each mode: bytes that a rank receives, and time that compute does not hide.

Derivation in docs/partition.md. f = (N-1)/N, T tokens of the global batch, P elements of the layer's matrices.

model-centric   4 f T D s (+ routing T k (8 + s))    all-gather and reduce-scatter, forward and backward, all exposed
data-centric    3 f P s                              gather, gather again, reduce-scatter; gathers hide behind compute
FSDP2           3 f P s                              the same, as it hides with two slots; other copies
"""

from __future__ import annotations

from hexa_fx.allocation import Measured
from hexa_fx.plan import ExpertShape, LayerCost, Mode, Reduce

_ID_BYTES = 8  # top_k_index is int64


def model_centric_bytes(
    shape: ExpertShape, tokens: int, world: int, *, dtype_bytes: int, reduce: Reduce = "reduce_scatter"
) -> float:
    """Bytes an average rank receives for one layer, forward and backward, model-centric.

    An all-reduce moves twice what a reduce-scatter does, and its backward is an all-reduce again.
    """
    share = (world - 1) / world
    activation = share * tokens * shape.hidden_size * dtype_bytes
    routing = share * tokens * shape.top_k * (_ID_BYTES + dtype_bytes)  # gathered once
    routing += share * tokens * shape.top_k * dtype_bytes  # gradient of the routing weights
    return (4 if reduce == "reduce_scatter" else 6) * activation + routing


def data_centric_bytes(shape: ExpertShape, world: int, *, gather_bytes: int, reduce_bytes: int) -> float:
    """Bytes an average rank receives for one layer, forward and backward, which gathers anew, data-centric."""
    return (world - 1) / world * shape.weight_numel * (2 * gather_bytes + reduce_bytes)


def layer_cost(
    shape: ExpertShape,
    tokens: int,
    world: int,
    *,
    dtype_bytes: int,
    reduce_bytes: int,
    slots: int,
    reduce: Reduce = "reduce_scatter",
    measured: Measured | None = None,
) -> tuple[Mode, LayerCost]:
    """The cheapest mode of one layer, and the numbers behind it.

    With `Measured`, the time that compute does not hide decides, else the bytes, which are the same for FSDP2 as data-centric. Ties
    go to model-centric, which needs no cache.
    """
    by_model = model_centric_bytes(shape, tokens, world, dtype_bytes=dtype_bytes, reduce=reduce)
    by_data = data_centric_bytes(shape, world, gather_bytes=dtype_bytes, reduce_bytes=reduce_bytes)
    if measured is None:
        mode: Mode = "model_centric" if by_model <= by_data else "data_centric"
        return mode, LayerCost(by_model, by_data, reason=f"fewer bytes for {tokens} tokens")
    exchange = by_model / measured.bandwidth + 8 * measured.latency if measured.exchange is None else measured.exchange
    time_model = exchange + measured.experts_model_centric
    moved = (dtype_bytes, reduce_bytes)
    time_data = measured.experts_data_centric + _data_centric_communication(by_data, measured, slots, *moved)
    times: dict[Mode, float] = {"model_centric": time_model, "data_centric": time_data}
    if measured.experts_fsdp is not None:
        times["fsdp"] = measured.experts_fsdp + _data_centric_communication(by_data, measured, 2, *moved)
    reason = f"less time for {tokens} tokens ({measured.describe()})"
    return min(times, key=lambda mode: times[mode]), LayerCost(
        by_model, by_data, time_model, time_data, times.get("fsdp"), reason
    )


def _data_centric_communication(total: float, m: Measured, slots: int, gather_bytes: int, reduce_bytes: int) -> float:
    """Seconds that gathers, and the reduce-scatter of the gradients, add to a step.

    Forward hides a gather behind attention and router (1 slot), also behind the experts (2 slots). Backward takes twice as
    long and hides the second gather in the same way, and the reduce-scatter behind all of it.
    """
    unit = total / (2 * gather_bytes + reduce_bytes) / m.bandwidth
    gather, scatter = unit * gather_bytes + m.latency, unit * reduce_bytes + m.latency
    layer = m.attention + m.expert
    beside_gather = layer if slots > 1 else m.attention
    forward = max(0.0, gather - beside_gather)
    backward = max(0.0, gather - 2 * beside_gather, gather + scatter - 2 * layer)
    exposed = forward + backward
    return exposed + m.contention * (2 * gather + scatter - exposed)
