"""Compile Triton kernels for sm_90 on a machine without a GPU, and see what they take of one."""

# pyright: reportMissingImports=false
# Triton comes with torch's CUDA builds alone.

import inspect
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
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
        "maxima": sorted(set(re.findall(r"max\.[\w.]*f32", found.asm["ptx"]))),
    }


class Caught:
    """Stands for a kernel, and compiles it for the arguments of each launch.

    Args:
        kernel: The kernel.
        found: Where what it takes is appended.
    """

    def __init__(self, kernel: Any, found: list[dict[str, Any]]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: Any) -> Any:
        """Return what takes the arguments of a launch."""
        return lambda *args, **options: self.found.append(compiled(self.kernel, args, options))
