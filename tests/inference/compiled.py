"""Compile the heavy-hitter kernels for sm_90 without a GPU; prints registers and spills as JSON.

python -m tests.inference.compiled
"""

# pyright: reportMissingImports=false

import inspect
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from joma.inference import HeavyHitter, _heavy_kernel
from joma.inference._store import Store

SHAPES = ((1, 16, 1, 3276, 128), (16, 16, 1, 3276, 128), (1, 8, 4, 3276, 128), (2, 3, 1, 90, 80))
"""Batch, key heads, queries of each, budget, numbers of a head; the first two are a benchmark's."""

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


def compiled(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return what a kernel takes when it is called with these arguments."""
    warps = options.pop("num_warps", 4)
    names = list(inspect.signature(kernel.fn).parameters)
    signature = dict.fromkeys(names, "constexpr")
    attributes: dict[tuple[int], Any] = {}
    for place, (name, given) in enumerate(zip(names, args, strict=False)):
        if isinstance(given, torch.Tensor):
            signature[name] = _TYPES[given.dtype]
            attributes[place,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(given, float) else "i32"
    constants = {(names.index(name),): given for name, given in options.items()}
    source = ASTSource(kernel, signature, constants, attributes)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(found.asm["ptx"])
        command = [triton.knobs.nvidia.ptxas.path, "-arch=sm_90a", "-v", path, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.findall(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill", said)
    return {
        "kernel": kernel.fn.__name__,
        "warps": warps,
        "registers": int(registers[0]),
        "spilled": sum(map(int, spilled)),
        "shared": found.metadata.shared,
    }


def step(batch: int, heads: int, group: int, budget: int, size: int, real: Any) -> list[Any]:
    """Return what the kernels of one step take."""
    found: list[Any] = []

    class Caught:
        """Takes the arguments of a kernel."""

        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: found.append(compiled(self.kernel, args, options))

    slots = budget + 1
    new: dict[str, Any] = {"dtype": torch.bfloat16}
    store = Store(
        keys=torch.empty(batch, heads, slots, size, **new),
        values=torch.empty(batch, heads, slots, size, **new),
        position=torch.empty(batch, heads, slots, dtype=torch.int32),
        seen=torch.zeros(batch, dtype=torch.int64),
        received=torch.empty(batch, heads, slots),
        empty=torch.zeros(batch, heads, dtype=torch.int64),
    )
    policy = HeavyHitter(budget // 2, budget // 2, "sum" if real is None else "mean")
    query = torch.empty(batch, heads * group, 1, size, **new)
    key = torch.empty(batch, heads, 1, size, **new)
    with (
        mock.patch.object(_heavy_kernel, "_parts", Caught(_heavy_kernel._parts)),
        mock.patch.object(_heavy_kernel, "_joined", Caught(_heavy_kernel._joined)),
    ):
        _heavy_kernel.heavy_step(store, policy, query, key, key, real, 1.0)
    return found


def main() -> None:
    """Print one line for each kernel and shape."""
    for shape in SHAPES:
        for real in (None, torch.ones(shape[0], 1, dtype=torch.bool)):
            for found in step(*shape, real):
                print(json.dumps({"shape": shape, "padded": real is not None, **found}))


if __name__ == "__main__":
    main()
