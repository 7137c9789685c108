"""Which GPUs have room for GaLore's kernels: compiled for each, launched into nothing; prints JSON.

python -m tests.optim.fitting CAPABILITY...

One line for each tile and compute capability, such as 89: the number of stages that fit.
"""

import json
import sys
from typing import Any

import torch

from joma.kernels import _galore_step as kernels
from tests.optim.interpreted import made, trained
from tests.pretend_gpu import pretend

CASES = {
    "eight": {"rank": 16, "bits": 8},
    "wide": {"rank": 160},
    "narrow": {"rank": 16},
}


def main() -> None:
    """Print one line for each tile and GPU."""
    for capability in map(int, sys.argv[1:]):
        for tile, settings in CASES.items():
            kernels._fit = kernels.Fitting()
            with pretend(capability):
                trained(*made(((192, 256),), **settings), steps=1)
            found: dict[Any, int] = kernels._fit._first
            ((key, place),) = found.items()
            assert key[0] == (torch.device("cpu"), tile)
            stages = kernels._STAGES[tile][place]
            print(
                json.dumps({"tile": tile, "capability": capability, "stages": stages}), flush=True
            )


if __name__ == "__main__":
    main()
