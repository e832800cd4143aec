"""The cost of an MoE layer in each mode: bytes that a rank receives, and time that compute does not hide.

Derivation in docs/partition.md. f = (N-1)/N, T tokens of the global batch, P elements of the layer's matrices.

model-centric   4 f T D s (+ routing T k (8 + s))    all-gather and reduce-scatter, forward and backward, all exposed
data-centric    3 f P s                              gather, gather again, reduce-scatter; gathers hide behind compute
FSDP2           3 f P s                              the same, as it hides with two slots; other copies
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hexa_fx.plan import ExpertShape, LayerCost, Mode, Reduce

_ID_BYTES = 8  # top_k_index is int64


@dataclass(frozen=True)
class Measured:
    """Measured times in seconds, which must be the same on all ranks.

    Args:
        bandwidth: bytes a second that one rank receives in a large collective.
        latency: seconds of one collective of a few bytes.
        attention: forward time of what runs between two MoE layers (attention and router) on a rank's own tokens, on the
            slowest rank.
        expert: forward time of the layer's experts on a rank's own tokens, on the slowest rank.
        experts_model_centric: forward and backward time of the experts with all tokens and a slice of the channels.
        experts_data_centric: the same with a rank's tokens and all channels, read from and packed into rows. Equal in
            arithmetic to the other, but not in time: model-centric moves N times the token rows through memory,
            data-centric copies weights and their gradients.
        contention: by how many seconds a second of concurrent communication slows down compute. Communication kernels take
            multiprocessors and memory bandwidth, so hidden communication is not free.
        exchange: forward and backward time of the collectives of a model-centric layer, the host's included; None if it was
            not measured. Then it follows from bytes and latency.
        experts_fsdp: as ``experts_data_centric``, with weights as the model stores them and FSDP2's copies; None where FSDP2 is no
            choice.
    """

    bandwidth: float
    latency: float = 0.0
    attention: float = 0.0
    expert: float = 0.0
    experts_model_centric: float = 0.0
    experts_data_centric: float = 0.0
    contention: float = 0.0
    exchange: float | None = None
    experts_fsdp: float | None = None

    def without_fsdp(self) -> Measured:
        """The same where FSDP2 is no choice."""
        return replace(self, experts_fsdp=None)

    def describe(self) -> str:
        """The numbers in one line."""
        milliseconds = {
            "attention": self.attention,
            "experts": self.expert,
            "experts' step model-centric": self.experts_model_centric,
            "data-centric": self.experts_data_centric,
        }
        if self.exchange is not None:
            milliseconds["exchange model-centric"] = self.exchange
        if self.experts_fsdp is not None:
            milliseconds["FSDP2"] = self.experts_fsdp
        times = ", ".join(f"{name} {1e3 * value:.3g} ms" for name, value in milliseconds.items())
        return f"{self.bandwidth / 1e9:.3g} GB/s, {times}, contention {self.contention:.2f}"


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
