"""One rank of a training under FSDP2 x hexa against one device: ``mesh_rank.py STORE RANK WORLD BACKEND STRATEGY even|uneven``."""

import sys

import torch
import torch.distributed as dist


def main(store: str, rank: int, world: int, backend: str, strategy: str, capacities: str) -> None:
    if backend == "nccl":
        torch.cuda.set_device(rank)
    from test_mesh import EVEN, FIRST, fsdp

    dist.init_process_group(backend, store=dist.FileStore(store, world), rank=rank, world_size=world)
    shares = EVEN if capacities == "even" else FIRST
    found, _, _ = fsdp(rank, world, "stacked", strategy, shares, (world // 2, 2), torch.float32)
    print(f"largest difference {max(found):.2e}", flush=True)
    assert max(found) < 1e-4, found
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    place, rank, world, *rest = sys.argv[1:]
    main(place, int(rank), int(world), *rest)
