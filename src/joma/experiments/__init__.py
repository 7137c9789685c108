"""What the papers claim and show, done again: one file or folder per figure or table, and `claims`.

An experiment makes numbers, compares them with the published ones and draws the comparison; it
holds no mathematics, no model and no drawing style of its own. Its file, or the `__init__.py` of
its folder, declares an `Experiment`: what was published, what may be asked of it and which function
does it. That declaration must import nothing heavy: all of them are read to answer `joma --help`.
`EXPERIMENTS` has every experiment that is found here, by the name that `joma reproduce` takes.
Training in groups, resuming, tables and figures are the work of `_frame`.
"""

import importlib
import pkgutil
import re
from typing import Any

from joma.experiments._claim_list import ListedClaim, list_claims
from joma.experiments._experiment import (
    ChoiceOption,
    Experiment,
    Option,
    Outcome,
    Request,
    Scale,
    Verdict,
)

__all__ = [
    "EXPERIMENTS",
    "ChoiceOption",
    "Experiment",
    "ListedClaim",
    "Option",
    "Outcome",
    "Request",
    "Scale",
    "Verdict",
    "list_claims",
]

EXPERIMENTS: dict[str, Experiment]


def _find() -> dict[str, Experiment]:
    """Return the experiments that the modules of this package declare.

    Those that train networks come last; in both parts figures come first.
    """
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    found = [
        declared
        for name in names
        if not name.startswith("_") and name != "claims"  # which takes long to import
        for declared in vars(importlib.import_module(f"{__name__}.{name}")).values()
        if isinstance(declared, Experiment)
    ]
    return {experiment.name: experiment for experiment in sorted(found, key=_order)}


def _order(experiment: Experiment) -> tuple[bool, bool, str]:
    name = re.sub(r"\d+", lambda number: number[0].zfill(3), experiment.name)
    return bool(experiment.scales), not name.startswith("fig"), name


def __getattr__(name: str) -> Any:
    if name == "EXPERIMENTS":
        return globals().setdefault(name, _find())
    if any(module.name == name for module in pkgutil.iter_modules(__path__)):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
