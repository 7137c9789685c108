"""The claims' ids, titles and sources, read from the source text without importing it.

The modules of `joma.experiments.claims` import SciPy and more, which takes seconds; a list of what
they claim should not. It follows `TOPICS` of that package to every `Claim(id="…", title="…", …)`,
whose three first arguments must therefore be literals.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_CLAIMS = "joma.experiments.claims"
_PACKAGE = Path(__file__).parents[2]  # the folder that holds `joma`


class ListedClaim(NamedTuple):
    """What `joma verify --list` says of a claim.

    Attributes:
        id: What `joma verify --claim` takes.
        title: The statement in one line.
        source: Where it is printed; "new" when it is ours.
    """

    id: str
    title: str
    source: str


def list_claims() -> tuple[ListedClaim, ...]:
    """Return every claim in the order of `joma.experiments.claims.CLAIMS`."""
    return tuple(_claims(_CLAIMS, _names(_CLAIMS)["TOPICS"]))


def _claims(module: str, node: ast.expr | str) -> Iterator[ListedClaim]:
    """Yield the claims of an expression in a module, or of a name that it imports."""
    match node:
        case str():
            source, _, name = node.rpartition(".")
            yield from _claims(source, _names(source)[name])
        case ast.Dict(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _claims(module, part)
        case ast.Starred(value=value):
            yield from _claims(module, value)
        case ast.Name(id=name):
            yield from _claims(module, _names(module)[name])
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            yield from _claims(module, f"{_names(module)[owner]}.{name}")
        case ast.Call(func=ast.Name(id="Claim"), keywords=keywords):
            given = {word.arg: word.value for word in keywords}
            yield ListedClaim(*(ast.literal_eval(given[field]) for field in ListedClaim._fields))
        case _:
            raise TypeError(f"{module} must list its claims one by one, got {ast.unparse(node)}")


@cache
def _names(module: str) -> dict[str, ast.expr | str]:
    """Return what the names of a module stand for: an expression, or what is imported."""
    path = _PACKAGE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found: dict[str, ast.expr | str] = {}
    for node in ast.parse(path.read_bytes()).body:
        match node:
            case ast.ImportFrom(module=str(source), names=names):
                found |= {name.asname or name.name: f"{source}.{name.name}" for name in names}
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                found[name] = value
    return found
