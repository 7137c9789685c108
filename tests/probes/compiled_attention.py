"""Compile every attention kernel for a GPU ahead of time, which needs none; prints JSON.

python -m tests.probes.compiled_attention [head sizes] [types] [compute capability]

One line for each kernel: seconds, bytes of shared memory, and which of its ways is the first that
fits the GPU, -1 where none does.
"""

# pyright: reportMissingImports=false

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from joma.probes._attention_kernel import (
    MOST_PARTS,
    Blocks,
    _columns,
    _ends,
    _extent,
    _rows,
    ways,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from tests.pretend_gpu import SHARED

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
NUMBERS = ("bits", "inverse", "lowest")
POINTERS = {"padding": "*i8", "real_rows": "*i8", "extent": "*i32", "tiles": "*i8"}
POINTERS |= {"words": "*i32"}
OUTPUTS = ("logsumexp", "entropy", "first_mass", "last_mass", "level_out", "reference_out")
OUTPUTS += ("reference", "received", "parts")


def built(
    function: Any, given: str, mask: str, constants: dict[str, Any], capability: int, **launch: int
) -> Any:
    """Compile a kernel for queries and masks of these types, all aligned as tensors are."""
    signature, values, attributes = {}, {}, {}
    for place, parameter in enumerate(function.params):
        name = parameter.name
        if name in constants:
            signature[name], values[place,] = "constexpr", constants[name]
            continue
        pointers = POINTERS | dict.fromkeys(OUTPUTS, "*fp32")
        pointers |= {"query": f"*{given}", "key": f"*{given}", "mask": f"*{mask}"}
        signature[name] = pointers.get(name, "fp32" if name in NUMBERS else "i32")
        if name in pointers or name.startswith(("query_stride", "key_stride")):
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, values, attributes)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=launch)


def fitting(
    function: Any,
    dtype: torch.dtype,
    mask: str,
    constants: dict[str, Any],
    given: tuple[Blocks, ...],
    capability: int,
) -> tuple[int, int]:
    """Return which way is the first that fits, and its shared memory; -1 and 0 if none does."""
    of_rows = function is _rows.row_kernel
    for place, by in enumerate(given):
        outer, inner = ("BLOCK_T", "BLOCK_S") if of_rows else ("BLOCK_S", "BLOCK_T")
        sizes = {outer: by.outer, inner: by.inner}
        with contextlib.suppress(RuntimeError):  # the compiler gave up
            everything = constants | sizes
            found = built(function, TYPES[dtype], mask, everything, capability, **by.options)
            if found.metadata.shared <= SHARED[capability]:
                return place, found.metadata.shared
    return -1, 0


def kernels(
    head: int, dtype: torch.dtype, *, few: bool = False
) -> Iterator[tuple[str, Any, str, dict[str, Any]]]:
    """Every kernel over rows and over keys for queries of a type: its name, mask and constants.

    With `few`, those for few rows, of which there are none over keys.
    """
    precision = "tf32x3" if dtype == torch.float32 else "tf32"
    common = {"D": head, "BLOCK_D": head, "PRECISION": precision}
    plain = {"GENERAL": False, "MASK": 0, "SOFTCAP": 0}
    general = {"GENERAL": True, "CAUSAL": False, "MASSES": True}
    for even in (True, False):
        variants = [
            plain | {"CAUSAL": causal, "MASSES": masses, "EVEN": even}
            for causal, masses in product((True, False), repeat=2)
        ]
        variants += [
            general | {"MASK": mask, "SOFTCAP": softcap, "EVEN": even}
            for mask, softcap in product((0, 1, 2), (0, 1, 2))
        ]
        for variant, parts in product(variants, (False, True)):
            if parts and (not few or variant["MASSES"] > variant["GENERAL"]):
                continue  # masses on the first and last keys need all keys in one program
            mask = ("i8", "i32", TYPES[dtype])[variant["MASK"]]
            of_rows = {"PARTS": parts, "MASSES": variant["MASSES"] and not parts}
            yield "rows", _rows.row_kernel, mask, common | variant | of_rows
            if variant["MASSES"] == variant["GENERAL"] and not few:
                constants = {it: value for it, value in variant.items() if it != "MASSES"}
                yield "keys", _columns.column_kernel, mask, common | constants


def main() -> None:
    """Print one line for each kernel."""
    heads = [int(it) for it in sys.argv[1].split(",")] if len(sys.argv) > 1 else [64, 128]
    names = sys.argv[2].split(",") if len(sys.argv) > 2 else ["bfloat16", "float16", "float32"]
    types = [getattr(torch, name) for name in names]
    capability = int(sys.argv[3]) if len(sys.argv) > 3 else 90
    for head, dtype, few in product(heads, types, (False, True)):
        for name, function, mask, constants in kernels(head, dtype, few=few):
            start = time.perf_counter()
            of_rows = ways(dtype, head, 1 if few else 10_000, 1 if few else 10_000)
            given = of_rows if name == "rows" else ways(dtype, head)
            way, shared = fitting(function, dtype, mask, constants, given, capability)
            took = time.perf_counter() - start
            which = {key: it for key, it in constants.items() if it and key.isupper()}
            line = {"kernel": name, "type": str(dtype), "seconds": round(took, 2)}
            print(json.dumps(line | {"shared": shared, "way": way} | which), flush=True)
    for mask, even in product(("i8", "bf16", "fp16", "fp32"), (True, False)):
        constants = {"NUMBERS": mask != "i8", "EVEN": even, "TILE": 64}
        built(_extent.tile_kernel, "bf16", mask, constants, capability)
        print(json.dumps({"kernel": "tiles", "type": mask, "EVEN": even}), flush=True)
    for mask, parts in product((0, 1, 2), (2, 8, MOST_PARTS)):
        constants = {"MASK": mask, "PARTS": parts, "BLOCK": 64}
        built(_ends.join_kernel, "bf16", "i8", constants, capability)
        print(json.dumps({"kernel": "join", "MASK": mask, "PARTS": parts}), flush=True)
    built(_extent.padding_kernel, "bf16", "i8", {"BLOCK": 1024}, capability)
    print(json.dumps({"kernel": "padding"}), flush=True)


if __name__ == "__main__":
    main()
