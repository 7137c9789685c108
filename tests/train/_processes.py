"""Two processes that train together, next to the one that tests them."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from joma.train.language import Processes, joined
from tests.train._language import write_text

Together = Callable[[Path, Processes], None]


@contextlib.contextmanager
def two_processes(module: str, folder: Path, seconds: float = 600) -> Iterator[None]:
    """Run a test module as two processes, which call `main`, until the block and they are done.

    Args:
        module: Its name.
        folder: Passed to both; the text is written to "text" in it.
        seconds: How long they may take.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    write_text(folder / "text")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    around = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "JOMA_CACHE": str(folder / "cache"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JOMA_CACHE", around["JOMA_CACHE"])
        children = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(folder)],
                cwd=Path(__file__).parents[2],
                env={**around, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.PIPE,
            )
            for rank in range(2)
        ]
        yield
        ends = [child.communicate(timeout=seconds)[1].decode() for child in children]
    assert [child.returncode for child in children] == [0, 0], "\n".join(ends)


def main(together: Together) -> None:
    """Do what one of the two processes does, and end."""
    with joined("cpu") as these:
        together(Path(sys.argv[1]), these)
    os._exit(0)  # threads of gloo may end after the interpreter, which aborts then
