"""How transformers learn: joint dynamics of MLP and attention, from theory to measurement.

`joma.theory` has the closed forms and exact laws of JoMA, Scan&Snap and GaLore; `joma verify`
checks every claim of the papers; `joma reproduce` makes their figures again; `joma.Monitor` watches
a model of one's own learn. Importing `joma` loads nothing heavy: a room is loaded when it is first
used.
"""

from typing import TYPE_CHECKING, Any

from joma.errors import JomaError

if TYPE_CHECKING:
    from joma import (
        analysis,
        data,
        experiments,
        integrations,
        models,
        optim,
        probes,
        random,
        report,
        runs,
        theory,
        train,
    )
    from joma.train.monitor import Monitor

    __version__: str

__all__ = [
    "JomaError",
    "Monitor",
    "__version__",
    "analysis",
    "citation",
    "data",
    "experiments",
    "integrations",
    "models",
    "optim",
    "probes",
    "random",
    "report",
    "runs",
    "theory",
    "train",
]

_ROOMS = frozenset(__all__) - {"JomaError", "Monitor", "__version__", "citation"}

_PAPERS = """\
@inproceedings{tian2024joma,
  title     = {{JoMA}: Demystifying Multilayer Transformers via Joint Dynamics of {MLP} and Attention},
  author    = {Tian, Yuandong and Wang, Yiping and Zhang, Zhenyu and Chen, Beidi and Du, Simon},
  booktitle = {International Conference on Learning Representations},
  year      = {2024},
  note      = {arXiv:2310.00535}
}

@inproceedings{tian2023scan,
  title     = {Scan and Snap: Understanding Training Dynamics and Token Composition in 1-layer Transformer},
  author    = {Tian, Yuandong and Wang, Yiping and Chen, Beidi and Du, Simon},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2023},
  note      = {arXiv:2305.16380}
}

@inproceedings{zhao2024galore,
  title     = {{GaLore}: Memory-Efficient {LLM} Training by Gradient Low-Rank Projection},
  author    = {Zhao, Jiawei and Zhang, Zhenyu and Chen, Beidi and Wang, Zhangyang and
               Anandkumar, Anima and Tian, Yuandong},
  booktitle = {International Conference on Machine Learning},
  year      = {2024},
  note      = {arXiv:2403.03507}
}
"""  # noqa: E501

_SOFTWARE = """\
@software{{joma,
  title   = {{joma: the mathematics, experiments and measurements of joint {{MLP}}/attention dynamics}},
  author  = {{{{The joma developers}}}},
  version = {{{version}}},
  license = {{Apache-2.0}}
}}
"""  # noqa: E501


def citation() -> str:
    """What to cite, as BibTeX: the JoMA, Scan&Snap and GaLore papers and this software."""
    return f"{_PAPERS}\n{_SOFTWARE.format(version=_version())}"


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("joma")
    except metadata.PackageNotFoundError:
        return "0+source"  # imported from a source tree that was not installed


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name == "Monitor":
        from joma.train.monitor import Monitor

        return Monitor
    if name in _ROOMS:
        import importlib

        return importlib.import_module(f"joma.{name}")
    raise AttributeError(f"module 'joma' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
