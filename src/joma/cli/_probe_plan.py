"""What `joma probe` would do and take, for `--dry-run`."""

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma.cli import _show

if TYPE_CHECKING:
    from joma.cli._probe import _Asked

_SHARE = 1.3
"""What measuring takes of plain forward passes, at most."""

_SIZE, _TRIES = 1024, 3


def show(asked: "_Asked", folder: Path | None) -> None:
    """Prints what would be measured of one model, where it goes, and what it takes."""
    from joma.runs import default_folder

    plan = {
        "model": asked.model,
        "run": str(folder or default_folder("probe")),
        "device": asked.device,
        "metrics": list(asked.probing.chosen),
        **takes(asked, str(asked.model), asked.revision),
    }
    if asked.json:
        _show.as_json(plan)
        return
    _show.say(f"{asked.model} → {plan['run']}")
    _show.say(f"  metrics: {', '.join(plan['metrics'])}")
    for line in lines(plan):
        _show.say(f"  {line}")


def takes(asked: "_Asked", source: str, revision: str | None) -> dict[str, Any]:
    """About how long one model takes and what memory, from the sizes of its files alone.

    Raises:
        JomaError: The model cannot be measured.
    """
    from joma.analysis.probing import check
    from joma.models.loading import check_source

    if not asked.probing.low_memory:
        check_source(
            source,
            revision=revision,
            tokenizer=asked.probing.tokenizer,
            reads_text=asked.probing.reads_text,
        )
    check(source, asked.read_text(), asked.probing, revision=revision)
    sizes = _sizes(source)
    if sizes is None:
        return {"about_seconds": None, "about_bytes": None, "tokens": None}
    parameters, largest = sizes
    tokens = 0
    if asked.probing.reads_text:
        from joma.analysis.probing import WINDOW

        tokens = asked.probing.windows * (asked.probing.window or WINDOW)
    work = 2.0 * parameters * tokens * _SHARE + 500.0 * parameters
    size = {"float32": 4, "float16": 2, "bfloat16": 2}[asked.probing.dtype]
    return {
        "about_seconds": work / _speed(asked.device) + 5,
        "about_bytes": 2 * largest if asked.probing.low_memory else 2 * parameters * size,
        "tokens": tokens,
    }


def lines(plan: dict[str, Any]) -> list[str]:
    """The same in words."""
    if plan["about_seconds"] is None:
        return [f"device: {plan['device']}", "what it takes is known once it is downloaded"]
    read = f"{plan['tokens']:,} tokens at most" if plan["tokens"] else "no text"
    return [
        f"device: {plan['device']}; reads {read}",
        f"about {_duration(plan['about_seconds'])}, memory about "
        f"{plan['about_bytes'] / 2**30:.1f} GB",
    ]


def _sizes(source: str) -> tuple[int, int] | None:
    """How many parameters there are about, and the bytes of the largest tensor; None if remote."""
    from joma.models.weight_files import WeightFiles

    path = Path(source)
    if path.is_dir() or path.suffix == ".safetensors":
        tensors = WeightFiles(source).tensors.values()
        return sum(math.prod(it.shape) for it in tensors), max(it.bytes for it in tensors)
    if path.is_file():
        bits = 5 if path.suffix == ".gguf" else 32
        return path.stat().st_size * 8 // bits, path.stat().st_size
    return None


def _speed(device: str) -> float:
    """Operations a second of this device, measured."""
    import torch

    matrix = torch.randn(_SIZE, _SIZE, device=device, generator=torch.Generator(device))
    best = math.inf
    for _ in range(_TRIES):
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * _SIZE**3 / best


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
