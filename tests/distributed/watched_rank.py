"""One rank of a job that is watched although it runs on Gloo: says who is lost and who left.   Arguments: STORE RANK.

Rank 1 ends by an exception that nobody catches, rank 2 normally; rank 0 reports.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch.distributed as dist

from hexa_fx.distributed import rank_failures
from hexa_fx.distributed.groups import make_groups


def main(store: str, rank: int) -> None:
    rank_failures.waits_on_device = lambda groups: True
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 3), rank=rank, world_size=3, timeout=timedelta(seconds=60)
    )
    groups = make_groups()
    rank_failures.watch(groups)
    watch = rank_failures._watchdogs[groups.main_name].detector
    if rank == 1:
        raise ValueError("this rank has had enough")
    if rank == 0:
        end = time.monotonic() + 20
        while time.monotonic() < end and not (watch.lost and watch.left):
            time.sleep(0.05)
        print(f"lost {watch.lost} left {watch.left}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
