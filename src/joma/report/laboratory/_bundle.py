"""Joins ES modules into one script: a page that is opened from a file cannot import others."""

import re
from collections.abc import Callable

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";\n', re.MULTILINE)
_REEXPORT = re.compile(r'^export \* from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:const|let|function|class) (\w+))", re.MULTILINE)


def bundle(entry: str, read: Callable[[str], str]) -> str:
    """Return one script with the module `entry` and all that it imports, each in its own scope.

    Args:
        entry: Name of the module whose imports are followed.
        read: Returns the source of a module by its name.
    """
    scopes: dict[str, str] = {}
    _add(entry, read, scopes)
    return "".join(scopes.values())


def _add(name: str, read: Callable[[str], str], scopes: dict[str, str]) -> None:
    if name in scopes:
        return
    source = read(name)
    if _REEXPORT.search(source):
        raise AssertionError(f"{name} must be imported by its parts, as it re-exports modules")
    needed: list[str] = []
    for names, module in _IMPORT.findall(source):
        _add(module, read, scopes)
        needed.append(f"const {{{' '.join(names.split())}}} = {_scope(module)};\n")
    exported = ", ".join(match[1] for match in _EXPORT.finditer(source))
    body = _EXPORT.sub("", _IMPORT.sub("", source))
    body = f"{''.join(needed)}{body}return {{ {exported} }};"
    scopes[name] = f"const {_scope(name)} = (() => {{\n{body}\n}})();\n"


def _scope(module: str) -> str:
    return f"scope_{module.removesuffix('.js')}"
