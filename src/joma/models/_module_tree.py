"""A module's tree in few lines: alike neighbours once, long trees cut."""

from torch import nn


def module_tree(module: nn.Module, most_lines: int = 60) -> str:
    """Names, classes and weight shapes of a module's parts, one line each.

    Of neighbours that look alike (the blocks of a transformer) the first is shown.
    """
    lines = [type(module).__name__, *_below(module, "  ")]
    if len(lines) > most_lines:
        left_out = len(lines) - most_lines
        lines = [*lines[:most_lines], f"  … and {left_out} lines more"]
    return "\n".join(lines)


def _below(module: nn.Module, indent: str) -> list[str]:
    lines: list[str] = []
    children = list(module.named_children())
    at = 0
    while at < len(children):
        name, child = children[at]
        inside = [_line(child), *_below(child, indent + "  ")]
        end = at + 1
        while end < len(children) and _same(inside, children[end][1], indent):
            end += 1
        label = name if end == at + 1 else f"{name}, likewise to {children[end - 1][0]}"
        lines += [f"{indent}{label}: {inside[0]}", *inside[1:]]
        at = end
    return lines


def _same(inside: list[str], other: nn.Module, indent: str) -> bool:
    # A lone leaf keeps its name: q_proj and k_proj look alike and are not.
    return len(inside) > 1 and inside == [_line(other), *_below(other, indent + "  ")]


def _line(module: nn.Module) -> str:
    shapes = [
        f"{name} {tuple(parameter.shape)}"
        for name, parameter in module.named_parameters(recurse=False)
        if not name.endswith("bias")
    ]
    return " ".join([type(module).__name__, *shapes])
