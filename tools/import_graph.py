"""Draw which room imports which: docs/figures/architecture.png.

    python tools/import_graph.py

Layers are read from the import-linter contract in pyproject.toml, imports from the source. An arrow
points from a room to one it imports, if it does not also import it through a room in between (the
transitive reduction); its width grows with the number of modules that do so. Rooms at the bottom,
which nearly all others import, stand in a row without arrows.
"""

import ast
import tomllib
from collections import Counter
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "joma"
TARGET = ROOT / "docs" / "figures" / "architecture.png"

FOUNDATION = ("random", "common", "errors")
ACROSS = {
    "cli": 4.4,
    "server": 4.3,
    "experiments": 6.9,
    "analysis": 1.8,
    "integrations": 9.4,
    "train": 8.0,
    "optim": 9.7,
    "report": 6.4,
    "inference": 2.4,
    "probes": 2.4,
    "models": 2.4,
    "data": 6.6,
    "runs": 9.2,
    "theory": 5.0,
}
"""Where each room stands, so that few arrows pass behind a box; others stand in the middle."""

INK, BOX, EDGE = "#1a1a1a", "#eef3f8", "#0072b2"


def layers() -> list[list[str]]:
    """Return the rooms that exist, layer by layer from the top."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    named = [[room.strip(" ()") for room in row.split("|")] for row in rows]
    return [[room for room in row if _path(room) is not None] for row in named]


def imports() -> Counter[tuple[str, str]]:
    """Return how many modules of one room import another room, for all pairs of rooms."""
    pairs: Counter[tuple[str, str]] = Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if len(parts) == 1 and parts[0].startswith("__"):
            continue
        pairs.update({(parts[0], room) for room in _imported_rooms(path) if room != parts[0]})
    return pairs


def _imported_rooms(path: Path) -> set[str]:
    """Return the rooms that one file imports, at its top or inside a function."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        parts = [name.split(".") for name in names]
        rooms |= {part[1] for part in parts if part[0] == "joma" and len(part) > 1}
    return {room for room in rooms if _path(room) is not None}


def _path(room: str) -> Path | None:
    places = (SOURCE / room, SOURCE / f"{room}.py")
    return next((place for place in places if place.exists()), None)


def _modules(room: str) -> int:
    place = _path(room)
    return len(list(place.rglob("*.py"))) if place is not None and place.is_dir() else 1


def reduced(pairs: Counter[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Return the imports that no chain of other imports stands for."""
    below: dict[str, set[str]] = {}

    def reach(room: str) -> set[str]:
        if room not in below:
            direct = {imported for importer, imported in pairs if importer == room}
            below[room] = direct.union(*(reach(imported) for imported in direct))
        return below[room]

    return {
        (room, imported): count
        for (room, imported), count in pairs.items()
        if not any(
            imported in reach(between)
            for importer, between in pairs
            if importer == room and between != imported
        )
    }


def draw() -> Figure:
    """Return the picture: one row a layer, arrows downward."""
    rows = [[room for room in row if room not in FOUNDATION] for row in layers()]
    rows = [*(row for row in rows if row), list(FOUNDATION)]
    kept = {pair for pair in imports() if not set(pair).intersection(FOUNDATION)}
    pairs = reduced(Counter({pair: imports()[pair] for pair in kept}))
    figure = Figure(figsize=(8.4, 1.05 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(0.4, 11), ylim=(-0.5, len(rows) - 0.5))
    axes.axis("off")
    centers = {
        room: (ACROSS.get(room, 5.6), height)
        for height, row in enumerate(reversed(rows))
        for room in row
    }
    centers |= {room: (2.4 + 3.3 * place, 0) for place, room in enumerate(FOUNDATION)}
    for (room, imported), count in pairs.items():
        (x0, y0), (x1, y1) = centers[room], centers[imported]
        arrow = FancyArrowPatch(
            (x0, y0 - 0.27),
            (x1, y1 + 0.27),
            arrowstyle="-|>",
            mutation_scale=12,
            linewidth=0.6 + 0.3 * count**0.5,
            color=EDGE,
            zorder=1,
        )
        axes.add_patch(arrow)
    for room, (x, y) in centers.items():
        box = FancyBboxPatch(
            (x - 1.05, y - 0.25),
            2.1,
            0.5,
            boxstyle="round,pad=0.02,rounding_size=0.1",
            facecolor=BOX,
            edgecolor=INK,
            linewidth=0.9,
            zorder=2,
        )
        axes.add_patch(box)
        count = _modules(room)
        files = "1 file" if count == 1 else f"{count} files"
        axes.text(x, y + 0.06, room, ha="center", va="center", fontsize=11.5, color=INK, zorder=3)
        axes.text(x, y - 0.15, files, ha="center", va="center", fontsize=7.5, color=INK, zorder=3)
    axes.text(5.7, 0.38, "imported by nearly every room", ha="center", fontsize=8, color=INK)
    return figure


def main() -> None:
    """Write the picture."""
    matplotlib.use("Agg")
    draw().savefig(TARGET, dpi=150, facecolor="white")


if __name__ == "__main__":
    main()
