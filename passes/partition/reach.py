"""Over how many devices experts should be split, and from where on data parallelism takes over, on hosts joined by slower links.

Numbers alone. N devices, of which a partition reaches over r and is repeated N / r times; replicas sum their gradients. T tokens
of the global batch, P elements of a layer's matrices, s bytes an element:

in the partition    as `hexa_fx.passes.partition.plan_layers`, for T r / N tokens on r devices
between replicas    2 (1 - r / N) s P / r, an all-reduce of a device's share, which hides behind the layer's backward

Of a collective over several hosts, each of its devices takes a part from other hosts and passes it on inside its own: with g of
its devices on a host it runs at g times what one receives from other hosts, at most at the speed inside. What hides behind the same
products on the same link takes turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hexa_fx.allocation import Measured
from hexa_fx.errors import PlanError
from hexa_fx.passes.partition.plan_layers import layer_cost
from hexa_fx.plan import ExpertShape, Mode

_ELEMENT = 2
"""s: weights, activations and gradients travel in half precision."""


@dataclass(frozen=True)
class Cluster:
    """Equal devices on equal hosts.

    Args:
        hosts, gpus: their number, and devices of each.
        inside, between: bytes a second that a device receives in a collective of one host, and from other hosts.
        flops: FLOP/s of a device in the experts' products.
        state_bytes: of a parameter with its gradient and optimizer state.
        memory: bytes for the state of experts that a device has.
    """

    hosts: int
    gpus: int
    inside: float
    between: float
    flops: float
    state_bytes: int = 16
    memory: float = float("inf")

    @property
    def devices(self) -> int:
        return self.hosts * self.gpus

    def link(self, on_a_host: int) -> float:
        """Bytes a second that a device receives in a collective over several hosts, with so many devices on each of them."""
        return min(self.inside, self.between * on_a_host)


@dataclass(frozen=True)
class Reach:
    """What one choice costs a step: seconds of all layers, of the slowest device.

    Args:
        devices: over which experts are split. replicas: of that.
        modes: how many layers run in which mode.
        experts: products. exchange: of the partition, as far as nothing hides it. gradients: between replicas, likewise.
        state: bytes of parameters, gradients and optimizer state of experts on a device.
        fits: whether that is within the device's memory.
    """

    devices: int
    replicas: int
    modes: Mapping[Mode, int]
    experts: float
    exchange: float
    gradients: float
    state: float
    fits: bool

    @property
    def total(self) -> float:
        return self.experts + self.exchange + self.gradients


def reaches(shapes: Mapping[str, ExpertShape], tokens: int, cluster: Cluster) -> tuple[Reach, ...]:
    """Every reach that divides a host or is whole hosts, from one device to all.

    Raises:
        PlanError: a size is not positive, or there are fewer tokens than devices.
    """
    rates = (cluster.inside, cluster.between, cluster.flops)
    if min(cluster.hosts, cluster.gpus) < 1 or min(rates) <= 0:
        raise PlanError(f"hosts, gpus and rates have to be above 0, got {cluster}")
    if tokens < cluster.devices:
        raise PlanError(f"{tokens} tokens are fewer than {cluster.devices} devices")
    within = [r for r in range(1, cluster.gpus + 1) if cluster.gpus % r == 0]
    beyond = [r * cluster.gpus for r in range(2, cluster.hosts + 1) if cluster.hosts % r == 0]
    return tuple(_reach(r, shapes, tokens, cluster) for r in (*within, *beyond))


def best(found: tuple[Reach, ...]) -> Reach:
    """The quickest that fits; of equally quick ones the one that reaches least far.

    Raises:
        PlanError: none fits.
    """
    fitting = [reach for reach in found if reach.fits]
    if not fitting:
        least = min(reach.state for reach in found) / 2**30
        raise PlanError(
            f"experts need {least:.3g} GiB a device even over all of them: more devices, or more memory in each"
        )
    return min(fitting, key=lambda reach: (reach.total, reach.devices))


def _reach(r: int, shapes: Mapping[str, ExpertShape], tokens: int, cluster: Cluster) -> Reach:
    replicas = cluster.devices // r
    modes: dict[Mode, int] = {}
    experts = exchange = gradients = state = 0.0
    for shape in shapes.values():
        forward = 2 * tokens / cluster.devices * shape.top_k * shape.weight_numel / shape.num_experts / cluster.flops
        experts += 3 * forward
        state += shape.weight_numel / r * cluster.state_bytes
        mode, exposed, summed = _communication(shape, tokens // replicas, r, cluster, forward)
        if r > 1:
            modes[mode] = modes.get(mode, 0) + 1
        exchange += exposed
        gradients += summed
    return Reach(r, replicas, modes, experts, exchange, gradients, state, state <= cluster.memory)


def _communication(
    shape: ExpertShape, tokens: int, r: int, cluster: Cluster, forward: float
) -> tuple[Mode, float, float]:
    """The better mode of a layer over r devices; seconds of its exchange and of the replicas' sums that nothing hides."""
    link = cluster.inside if r <= cluster.gpus else cluster.link(cluster.gpus)
    outer = cluster.inside if cluster.hosts == 1 else cluster.link(max(1, cluster.gpus // r))
    products = 3 * forward
    measured = Measured(link, 0.0, 0.0, forward, products, products)
    _, cost = layer_cost(shape, tokens, r, dtype_bytes=_ELEMENT, reduce_bytes=_ELEMENT, slots=2, measured=measured)
    assert cost.seconds_model_centric is not None
    assert cost.seconds_data_centric is not None
    sent = 2 * (1 - r / cluster.devices) * _ELEMENT * shape.weight_numel / r / outer
    shared = r > cluster.gpus or cluster.hosts == 1
    # with a gather and a sum, beside the same backward
    busy = cost.bytes_data_centric * 2 / 3 / link if shared else 0.0
    by_mode: dict[Mode, tuple[float, float]] = {
        "model_centric": (cost.seconds_model_centric - products, max(0.0, sent - 2 * forward)),
        "data_centric": (cost.seconds_data_centric - products, max(0.0, sent - max(0.0, 2 * forward - busy))),
    }
    mode = min(by_mode, key=lambda mode: sum(by_mode[mode]))
    return mode, *by_mode[mode]
