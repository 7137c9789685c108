"""Two processes of one gloo group, for tests of what processes do together."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

_Work = Callable[[int, str], None]


def run_in_two_processes(work: _Work, folder: Path) -> None:
    """Call work(rank, folder) in two processes of one group; raise what one of them raises.

    Args:
        work: A function of a module, which the processes import.
        folder: Where the processes meet, and may leave what they found.
    """
    spawn(_one_of_two, (work, str(folder)), nprocs=2)


def _one_of_two(rank: int, work: _Work, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    work(rank, folder)
    dist.barrier()  # before one of them is gone
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo may end after the interpreter, which aborts then
