"""A kernel that is launched to see whether kernels can be (Triton)."""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

import torch
import triton
import triton.language as tl


def doubles_numbers(device: torch.device) -> bool:
    """Return whether a kernel that doubles numbers does so on a GPU."""
    numbers = torch.arange(_COUNT, dtype=torch.float32, device=device)
    out = torch.empty_like(numbers)
    with torch.cuda.device_of(numbers):  # Triton launches on the current device
        _doubled[(1,)](numbers, out, COUNT=_COUNT)
    return torch.equal(out, 2 * numbers)


_COUNT = 64


@triton.jit
def _doubled(numbers, out, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out + place, 2 * tl.load(numbers + place))
