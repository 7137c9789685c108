"""Compare the kernel that draws words with torch operations, in Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.interpreted_random

Each case prints a line of JSON: its arguments, and whether all words are equal.
"""

# pyright: reportMissingImports=false
# Triton comes with torch's CUDA builds alone.

import json
import zlib

import torch

from joma import random
from tests.optim.interpreted import complete_the_interpreter

SEEDS = torch.tensor([0, 3, -1, 2**40 + 5, -(2**63), 2**63 - 1])
STEPS = (0, 7, 2**32 - 1, 2**33 + 7, 2**63 - 1)


def main() -> None:
    complete_the_interpreter()
    from joma.random import _words_kernel

    each = torch.tensor((*STEPS, 1))
    device = torch.device("cpu")  # here the trial does not need a GPU
    print(json.dumps({"step": "trial", "equal": random._tried_kernel(device) is _words_kernel}))
    for stream, seeds, step, (first, last) in (
        *(("labels", SEEDS, step, (0, 300)) for step in STEPS),
        ("labels", SEEDS, torch.tensor(2**40 + 9), (0, 1)),
        ("wide", SEEDS, each, (2**31 - 3, 2**31 + 5)),
        ("wide", SEEDS[::2], each[::2], (1021, 1025)),
        ("wide", SEEDS[1:2], 5, (2**32 - 8, 2**32)),
    ):
        number = zlib.crc32(stream.encode())
        found = _words_kernel.words(seeds, number, step, first, last)
        equal = torch.equal(found, random._words_of_torch(seeds, number, step, first, last))
        print(json.dumps({"step": str(step), "blocks": [first, last], "equal": equal}))


if __name__ == "__main__":
    main()
