"""What `joma probe` and `joma probe --series` are asked for, and what that would take."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma.cli import _show
from joma.common.text import duration

if TYPE_CHECKING:
    from joma.analysis.probing import Probing

_SHARE = 1.3
"""What measuring takes of plain forward passes, at most."""

_SIZE, _TRIES = 1024, 3


@dataclass(frozen=True)
class ProbeRequest:
    """What the user wants measured, and how."""

    model: str | None
    revision: str | None
    text: str
    probing: "Probing"
    device: str
    out: Path | None
    json: bool

    def read_text(self) -> str:
        """Return the text, as much of it as is needed; empty where none is."""
        from joma.data.text import read_text

        return self.probing.beginning(read_text(self.text)) if self.probing.reads_text else ""

    @property
    def config(self) -> dict[str, Any]:
        """What decides the numbers of one model."""
        named = {"model": self.model, "revision": self.revision}
        text = {"text": self.text} if self.probing.reads_text else {}
        return {**named, **text, **self.probing.config}


def show_plan(
    asked: ProbeRequest,
    name: str,
    what: dict[str, Any],
    takes: dict[str, Any],
    notes: tuple[str, ...] = (),
) -> None:
    """Print what would be measured, where it goes, and what it takes.

    Args:
        asked: the request.
        name: of the run.
        what: the model or series, by what it is called in JSON, and what else is known of it.
        takes: what `estimate` returned; empty where nothing is left to do.
        notes: lines about what is measured.
    """
    from joma.runs import default_folder

    run, metrics = str(asked.out or default_folder(name)), list(asked.probing.chosen)
    first = dict([next(iter(what.items()))])
    rest = {"run": run, "device": asked.device, "metrics": metrics}
    plan = {**first, **rest, **what, **takes}
    if asked.json:
        _show.as_json(plan)
        return
    lines = [*notes, f"metrics: {', '.join(metrics)}"]
    if takes and takes["about_seconds"] is None:
        lines += [f"device: {asked.device}", "what it takes is known once it is downloaded"]
    elif takes:
        read = f"{takes['tokens']:,} tokens at most" if takes["tokens"] else "no text"
        lines.append(f"device: {asked.device}; reads {read}")
        gigabytes = takes["about_bytes"] / 2**30
        lines.append(f"about {duration(takes['about_seconds'])}, memory about {gigabytes:.1f} GB")
    _show.say(f"{next(iter(first.values()))} → {run}")
    for line in lines:
        _show.say(f"  {line}")


def estimate(asked: ProbeRequest, source: str, revision: str | None) -> dict[str, Any]:
    """Return about how long one model takes and what memory, from the sizes of its files alone.

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
    sizes = file_sizes(source)
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
        "about_seconds": work / device_speed(asked.device) + 5,
        "about_bytes": 2 * largest if asked.probing.low_memory else 2 * parameters * size,
        "tokens": tokens,
    }


def file_sizes(source: str) -> tuple[int, int] | None:
    """Return about how many parameters there are and the bytes of the largest tensor, if here."""
    from joma.models.weight_files import WeightFiles

    path = Path(source)
    if path.is_dir() or path.suffix == ".safetensors":
        tensors = WeightFiles(source).tensors.values()
        return sum(math.prod(it.shape) for it in tensors), max(it.bytes for it in tensors)
    if path.is_file():
        bits = 5 if path.suffix == ".gguf" else 32
        return path.stat().st_size * 8 // bits, path.stat().st_size
    return None


def device_speed(device: str) -> float:
    """Return operations a second of this device, measured."""
    import torch

    matrix = torch.randn(_SIZE, _SIZE, device=device, generator=torch.Generator(device))
    best = math.inf
    for _ in range(_TRIES):
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * _SIZE**3 / best
