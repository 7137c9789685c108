"""Findings in a picture: a numbered mark where each began, and a list of what the numbers mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from joma.report import figures

_COLORS = {"critical": figures.VERMILLION, "warning": figures.ORANGE, "note": figures.SKY}
_MOST_LISTED = 7
_APART = 0.035
"""Share of the axis by which marks on one level are apart."""
_WIDEST = 58


@dataclass(frozen=True)
class FindingGroup:
    """Findings of one kind and severity, which share a mark.

    Attributes:
        number: The number of the mark, from 1.
        kind: Name of their rule.
        severity: How bad they are; "" where an older version did not record it.
        step: The first step since which one of them shows.
        layers: Indices of the layers concerned.
        count: How many findings there are.
    """

    number: int
    kind: str
    severity: str
    step: int
    layers: tuple[int, ...]
    count: int

    @property
    def color(self) -> str:
        """Colour of the severity."""
        return _COLORS.get(self.severity, figures.GREY)

    @property
    def label(self) -> str:
        """What was found, in a few words."""
        words = self.kind.replace("_", " ")
        if self.layers:
            plural = "s" if len(self.layers) > 1 else ""
            words += f", layer{plural} {ranges(self.layers)}"
        elif self.count > 1:
            words += f", {self.count} times"
        return words


def grouped(findings: Sequence[dict[str, Any]]) -> list[FindingGroup]:
    """Return findings by kind and severity, the most severe first.

    Args:
        findings: Records as `joma.runs.read_findings` returns them.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in findings:
        key = str(one.get("kind", "finding")), str(one.get("severity") or "")
        groups.setdefault(key, []).append(one)
    found = []
    for number, ((kind, severity), own) in enumerate(groups.items(), 1):
        steps = [step for one in own if isinstance(step := one.get("step"), int)]
        layers = {layer for one in own if isinstance(layer := one.get("layer"), int)}
        where = min(steps, default=0), tuple(sorted(layers)), len(own)
        found.append(FindingGroup(number, kind, severity, *where))
    return found


def ranges(numbers: Sequence[int]) -> str:
    """Return increasing whole numbers with dashes between neighbours: "0–3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{it[0]}–{it[-1]}" if len(it) > 1 else f"{it[0]}" for it in runs)


def mark_steps(ax: Axes, groups: Sequence[FindingGroup]) -> None:
    """Draw a thin line at the step of each group."""
    for group in groups:
        ax.axvline(group.step, color=group.color, lw=0.9, ls=(0, (4, 2)), zorder=1.5)


def draw_findings(ax: Axes, marked: Axes, groups: Sequence[FindingGroup]) -> None:
    """List the groups in one panel, and put their numbers above another.

    Args:
        ax: The panel of the list, which has nothing else.
        marked: The panel with the steps; its limits are set already.
        groups: What to list.
    """
    ax.set_axis_off()
    ax.set_title("Findings", loc="left", fontsize=10)
    first, last = marked.get_xlim()
    levels: list[float] = []
    for group in sorted(groups, key=lambda it: it.step):
        place = (group.step - first) / (last - first)
        place = min(max(place, 0.0), 1.0)
        level = next((i for i, end in enumerate(levels) if place - end >= _APART), len(levels))
        levels[level : level + 1] = [place]
        _number(marked, group, place, 0.97 - 0.095 * min(level, 8))
    if not groups:
        ax.text(0.0, 0.9, "none", color=figures.GREY, fontsize=9, va="top")
    shown = groups if len(groups) <= _MOST_LISTED + 1 else groups[:_MOST_LISTED]
    for row, group in enumerate(shown):
        y = 0.95 - 0.12 * row
        _number(ax, group, 0.015, y)
        severity = f"{group.severity}: " if group.severity else ""
        words = f"{severity}{group.label}, from step {group.step:,}"
        words = words if len(words) <= _WIDEST else words[: _WIDEST - 1] + "…"
        ax.text(0.05, y, words, transform=ax.transAxes, fontsize=8.5, va="center", parse_math=False)
    if len(shown) < len(groups):
        more = f"… and {len(groups) - len(shown)} more, see joma runs show"
        ax.text(0.05, 0.95 - 0.12 * len(shown), more, fontsize=8.5, color=figures.GREY, va="center")


def _number(ax: Axes, group: FindingGroup, x: float, y: float) -> None:
    box = {"boxstyle": "circle,pad=0.22", "fc": group.color, "ec": "white", "lw": 0.6}
    ax.text(
        x,
        y,
        str(group.number),
        transform=ax.transAxes,
        ha="center",
        va="center",
        fontsize=7,
        weight="bold",
        color="white" if group.severity == "critical" or not group.severity else figures.BLACK,
        bbox=box,
        zorder=6,
    )
