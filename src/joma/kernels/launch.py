"""Launch a kernel that was launched before without binding its arguments again (Triton).

Triton binds and inspects every argument of every launch: 60 µs for the 45 of an attention kernel,
where the softmax of a small shape takes 100 in all. What it finds by that depends on a few facts
that the caller knows: the compiled kernel is kept for them, and launched as a compiled kernel is in
Triton's tutorials.
"""

# pyright: reportMissingImports=false

from collections.abc import Hashable, Mapping
from operator import itemgetter
from typing import Any

LARGEST = 2**31 - 1
"""Beyond it Triton takes a whole number to have 64 bits."""


class Launcher:
    """A kernel of Triton, and what was compiled of it.

    Args:
        kernel: The kernel.
        inspected: Names of the arguments that are inspected, those of `do_not_specialize` aside.
    """

    def __init__(self, kernel: Any, inspected: tuple[str, ...]) -> None:
        self._kernel = kernel
        self._arguments = itemgetter(*kernel.arg_names)
        self._inspected = inspected
        self._compiled: dict[Hashable, Any] = {}
        self._tensors: tuple[int, ...] = ()

    def __call__(
        self,
        grid: tuple[int, int, int],
        kind: tuple[Hashable, ...],
        arguments: Mapping[str, Any],
        options: Mapping[str, int],
    ) -> None:
        """Launch the kernel on the current device.

        Args:
            grid: Numbers of programs.
            kind: All that decides what is compiled, but for the inspected arguments: device, types
                of tensors and constants.
            arguments: All arguments by name, constants too. Whole numbers that are not inspected
                have always 32 bits, or `kind` says which do not.
            options: Options of the compiler, which follow from `kind`.
        """
        inspected = [
            (it % 16 == 0, it == 1, _bits(it)) if isinstance(it, int) else it.data_ptr() % 16
            for it in map(arguments.__getitem__, self._inspected)
        ]
        key = (*kind, *inspected)
        values = list(self._arguments(arguments))
        compiled = self._compiled.get(key)
        if compiled is not None:
            for place in self._tensors:  # Triton would ask the driver about each
                values[place] = values[place].data_ptr()
            compiled[grid](*values)
            return
        self._tensors = tuple(i for i, it in enumerate(values) if hasattr(it, "data_ptr"))
        compiled = self._kernel[grid](**arguments, **options)
        if hasattr(compiled, "metadata"):  # not in Triton's interpreter
            self._compiled[key] = compiled


def _bits(number: int) -> int:
    """Return what Triton takes a whole number to have: 32 bits, 64, or 64 without a sign."""
    if -LARGEST - 1 <= number <= LARGEST:
        return 32
    return 64 if number < 2**63 else -64
