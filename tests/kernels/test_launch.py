"""Launches of compiled kernels, with a stand-in for Triton, which launches on GPUs alone."""

from typing import Any

import torch

from joma.kernels.launch import Launcher


class Compiled:
    """What Triton returns of a launch: it is launched by position."""

    metadata = None

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.launched.append((grid, *arguments))


class Kernel:
    """A kernel that counts what it compiles."""

    arg_names = ("x", "stride", "SIZE")

    def __init__(self, result: type = Compiled) -> None:
        self._result = result
        self.compiled: list[Any] = []
        self.given: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(**arguments: Any) -> Any:
            self.given.append(arguments)
            self.compiled.append(self._result())
            return self.compiled[-1]

        return launch


GRID = (3, 2, 1)
ALIGNED = torch.zeros(64)


def arguments(x: torch.Tensor = ALIGNED, stride: int = 32) -> dict[str, Any]:
    return {"SIZE": 8, "stride": stride, "x": x}


def test_what_was_compiled_is_launched_by_position() -> None:
    kernel = Kernel()
    launch = Launcher(kernel, ("x", "stride"))
    launch(GRID, ("float32",), arguments(), {"num_warps": 4})
    assert kernel.given[0]["num_warps"] == 4
    launch(GRID, ("float32",), arguments(stride=48), {"num_warps": 4})
    assert len(kernel.compiled) == 1
    ((grid, x, stride, size),) = kernel.compiled[0].launched
    assert (grid, stride, size) == (GRID, 48, 8)
    assert x == ALIGNED.data_ptr()


def test_what_triton_would_compile_again_is_not_mixed_up() -> None:
    """It compiles for multiples of 16, for 1, for 64 bits, and for aligned addresses."""
    kernel = Kernel()
    launch = Launcher(kernel, ("x", "stride"))
    strides = (32, 33, 1, 2**31, -(2**40), 2**63)
    kinds = [arguments(stride=it) for it in strides[:4]] + [arguments(ALIGNED[1:])]
    kinds += [arguments(stride=strides[5])]
    for _ in range(2):
        for given in kinds:
            launch(GRID, ("float32",), given, {})
        launch(GRID, ("bfloat16",), arguments(), {})
    assert len(kernel.compiled) == 7
    assert [len(one.launched) for one in kernel.compiled] == [1] * 7
    launch(GRID, ("float32",), arguments(stride=strides[4]), {})  # 64 bits, as 2³¹ has
    assert len(kernel.compiled) == 7


def test_one_inspected_argument() -> None:
    kernel = Kernel()
    launch = Launcher(kernel, ("x",))
    for x in (ALIGNED, ALIGNED[4:], ALIGNED[1:], ALIGNED):
        launch(GRID, (), arguments(x), {})
    assert len(kernel.compiled) == 2


def test_an_interpreter_compiles_nothing() -> None:
    kernel = Kernel(type(None))
    launch = Launcher(kernel, ("x", "stride"))
    for _ in range(3):
        launch(GRID, (), arguments(), {})
    assert len(kernel.compiled) == 3
