"""The kind of an attention module: self or cross, and the tower of the model it belongs to."""

import re
from collections.abc import Iterator

from torch import nn

_CROSS = re.compile(r"cross|encoder_attn|encdec|enc_attn|encoder_decoder", re.IGNORECASE)
_ATTENTION = re.compile(r"atten|attn", re.IGNORECASE)
_SUFFIX = re.compile(r"_(model|tower|backbone|transformer|layers|blocks|stack)$")


def is_attention(module: nn.Module) -> bool:
    """Return whether the name of a module's class says that it attends."""
    return _ATTENTION.search(type(module).__name__) is not None


def is_cross(path: str, module: nn.Module) -> bool:
    """Return whether a module attends to another sequence than its own, by its name."""
    own = getattr(module, "is_cross_attention", None)
    if isinstance(own, bool) and own:
        return True
    parts = path.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    inside = parts[numbers[-1] + 1 :] if numbers else parts[-2:]
    return any(_CROSS.search(part) for part in inside)


class Towers:
    """The names of a model's towers, "encoder" and "decoder" or "text" and "vision".

    A tower is a branch of the module tree with a list of layers that attend. A model with one such
    list has no towers.
    """

    def __init__(self, model: nn.Module) -> None:
        stacks = [path.split(".") for path in _stacks(model, "")]
        depth = 0
        while all(len(path) > depth and path[depth] == stacks[0][depth] for path in stacks):
            depth += 1
            if len(stacks) < 2:
                break
        self._depth = depth
        self._prefix = stacks[0][:depth] if stacks else []
        self._names: dict[str, str] = {}
        if len(stacks) > 1:
            for path in stacks:
                part = path[depth] if len(path) > depth else ""
                self._names[part] = _SUFFIX.sub("", part).replace("_", " ").strip()

    def kind(self, path: str, *, cross: bool) -> str:
        """Return "self" or "cross", after the name of the tower where there are several."""
        what = "cross" if cross else "self"
        parts = path.split(".")
        if len(self._names) < 2 or parts[: self._depth] != self._prefix:
            return what
        part = parts[self._depth] if len(parts) > self._depth else ""
        return f"{self._names.get(part, '')} {what}".strip()


def _stacks(module: nn.Module, path: str) -> Iterator[str]:
    """Yield the paths of the outermost lists of layers that attend."""
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if not isinstance(child, nn.ModuleList):
            yield from _stacks(child, inner)
        elif any(is_attention(part) for part in child.modules()):
            yield inner
