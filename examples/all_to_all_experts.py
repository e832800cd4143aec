"""Expert parallelism by hand: an all-to-all brings rows to the ranks that hold their experts, and `hexa_fx.ops.experts` runs them.

    torchrun --nproc_per_node 2 examples/all_to_all_experts.py

Each rank owns whole experts. Buffers have room for every row there can be, so no host reads back how many rows arrived: the counts
stay on the device, and rows that nobody sent are never read. To move fewer bytes, send only what there is and let the hosts
exchange the sizes; `counts` of all senders then say which rows are whose.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from hexa_fx import ops
from hexa_fx.ir import FfnSpec

WIDTH, CHANNELS, EXPERTS, TOP_K = 32, 48, 8, 2
SPEC = FfnSpec("silu", "concat")


class AllToAllExperts(nn.Module):
    """A mixture of experts of which this rank holds ``EXPERTS / world``."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.local = EXPERTS // self.world
        generator = torch.Generator().manual_seed(0)
        gate_up = torch.randn(EXPERTS, 2 * CHANNELS, WIDTH, generator=generator) * 0.2
        down = torch.randn(EXPERTS, WIDTH, CHANNELS, generator=generator) * 0.2
        mine = slice(self.rank * self.local, (self.rank + 1) * self.local)
        self.gate_up, self.down = nn.Parameter(gate_up[mine].clone()), nn.Parameter(down[mine].clone())
        self.router = nn.Parameter(torch.randn(EXPERTS, WIDTH, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, D), with as many tokens on every rank."""
        weights, index = (x @ self.router.t()).softmax(-1).topk(TOP_K)
        expert, order = index.flatten().sort(stable=True)
        counts = torch.bincount(expert, minlength=EXPERTS).view(self.world, self.local)
        # Each rank's buffer has a block for every other one, with room for all rows; those it gets lie at the front.
        room, owner = len(order), expert // self.local
        first = counts.sum(1).cumsum(0) - counts.sum(1)
        place = owner * room + torch.arange(room, device=x.device) - first[owner]
        sent = x.new_zeros(self.world * room, WIDTH).index_copy(0, place, x[order // TOP_K])
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        blocks = exchange(sent).view(self.world, room, WIDTH)
        y = ops.experts(blocks, theirs, None, self.gate_up, None, None, None, self.down, None, SPEC)
        back = exchange(y.view(-1, WIDTH))[place]
        slots = torch.empty_like(back).index_copy(0, order, back).view(*index.shape, WIDTH)
        return (slots * weights.unsqueeze(-1)).sum(1)


def exchange(rows: Tensor) -> Tensor:
    """An equal part of the rows to every rank. Its backward is another exchange."""
    arrived: Tensor = funcol.all_to_all_single_autograd(rows, None, None, dist.group.WORLD)
    return funcol.wait_tensor(arrived)


def whole(model: AllToAllExperts, x: Tensor) -> Tensor:
    """The same with all experts on one rank."""
    gate_up, down = (gathered(w.detach()) for w in (model.gate_up, model.down))
    weights, index = (x @ model.router.t()).softmax(-1).topk(TOP_K)
    return ops.moe_ffn(x, index, weights, gate_up, None, None, None, down, None, SPEC)


def gathered(part: Tensor) -> Tensor:
    """The parts of all ranks, one below the other."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return torch.cat(parts)


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit("several processes are needed: torchrun --nproc-per-node 2 examples/all_to_all_experts.py")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = AllToAllExperts().to(device)
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1 + dist.get_rank())).to(device)
    y = model(x)
    y.square().mean().backward()
    torch.testing.assert_close(y, whole(model, x))
    print(f"rank {dist.get_rank()}: {len(x)} tokens, experts of all ranks, equal to one device")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
