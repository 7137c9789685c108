"""A contract for import-linter: what one room keeps private, no other room imports.

A room is a package or module directly below `joma`. A module or name is private if any part of its
dotted path below the room begins with an underscore.
"""

import ast
from pathlib import Path
from typing import Any

from importlinter import Contract, ContractCheck, fields
from importlinter.application import output


class PrivateModules(Contract):
    """Forbid imports of private modules and names across the rooms of a package.

    Attributes:
        root: Name of the package.
    """

    root = fields.StringField()

    def check(self, graph: Any, verbose: bool) -> ContractCheck:
        """Return whether the contract holds, with the imports that break it."""
        broken = []
        root = str(self.root)
        for module in sorted(graph.find_descendants(root) | {root}):
            for imported, line in _imported_names(module, root):
                private = any(_is_private(part) for part in imported.split(".")[1:])
                if private and _room(imported) != _room(module):
                    broken.append(f"{module} imports {imported} (line {line})")
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the imports that break the contract."""
        for line in check.metadata["broken"]:
            output.print_error(line)
            output.new_line()


def _imported_names(module: str, root: str) -> list[tuple[str, int]]:
    """Return the dotted names below `root` that a module imports, with their lines."""
    path = Path("src", *module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == root:
            names += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
        elif isinstance(node, ast.Import):
            own = [alias.name for alias in node.names if alias.name.split(".")[0] == root]
            names += [(name, node.lineno) for name in own]
    return names


def _room(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.endswith("__")
