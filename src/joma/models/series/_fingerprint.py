"""Fingerprints of checkpoints: hashes of their files, and a sketch of their weights.

All distances within a series come from reading each checkpoint once: its weights w are folded into
few numbers, Σ ±wᵢ over the i of one remainder, with signs that are random but the same for every
checkpoint. The map is linear, so the sketch of a difference is the difference of the sketches; its
length is that of the difference to about 1/√(2·`SKETCH_SIZE`) = 0.8% (one standard error over the
signs), and exactly zero where weights are equal.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from joma.common.files import replacing
from joma.errors import JomaError
from joma.models.checksums import SUMS, check_checksums, sha256
from joma.models.hub import is_tokenizer_file, local_folder
from joma.models.weight_files import WeightFiles

SKETCH_SIZE = 8191
"""Numbers in a sketch; a prime, so that neither rows nor columns of a matrix share a remainder."""

_AT_ONCE = 512 * SKETCH_SIZE


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """One checkpoint's files and weights, in short.

    Attributes:
        files: sha256 of each weight file, by its name.
        shapes: names and shapes of all tensors.
        norm: √Σ w² over all weights.
        sketch: (`SKETCH_SIZE`,), see above.
        verified: Whether checksums written with the files have been compared with them.
    """

    files: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    norm: float
    sketch: NDArray[np.float64]
    verified: bool = False

    @property
    def contents(self) -> tuple[str, ...]:
        """The hashes without the names: what makes two checkpoints byte-identical."""
        return tuple(sorted(self.files.values()))

    def distance(self, other: "Fingerprint") -> float:
        """Return ‖w − w'‖, estimated."""
        return float(np.linalg.norm(self.sketch - other.sketch))


def fingerprint(source: str | Path, *, revision: str | None = None) -> Fingerprint:
    """Return the fingerprint of a checkpoint, which is read once, tensor by tensor.

    Whole numbers and truth values, which are masks and counters, count in `shapes` alone.

    Raises:
        ValueError: it cannot be read, holds numbers that are not finite, or is not as its checksums
            have it.
    """
    stored = WeightFiles(source, revision=revision)
    sketch, square = np.zeros(SKETCH_SIZE), 0.0
    for name in sorted(stored.names):  # in one order, in whatever files they lie
        if not stored.tensors[name].bytes:
            continue
        tensor = stored.read(name)
        if not tensor.is_floating_point():
            continue
        square += _add(tensor, name, sketch)
        if not np.isfinite(square):
            raise JomaError(f"{stored.tensors[name].file} holds NaN or infinity in {name}")
    files = {str(path.relative_to(stored.folder)): sha256(path) for path in stored.files}
    return Fingerprint(
        files=files,
        shapes={name: tensor.shape for name, tensor in stored.tensors.items()},
        norm=float(np.sqrt(square)),
        sketch=sketch,
        verified=check_checksums(stored.folder, files),
    )


def kept_fingerprint(kept: Path, source: str | Path, revision: str | None = None) -> Fingerprint:
    """Return `fingerprint`, from the file `kept` if it is of these files; else write it there.

    Files are taken to be the same while their sizes and times of change are.
    """
    stored = WeightFiles(source, revision=revision)
    stamps = {
        str(path.relative_to(stored.folder)): [path.stat().st_size, path.stat().st_mtime_ns]
        for path in (*stored.files, stored.folder / SUMS)
        if path.exists()
    }
    if (before := _read(kept, stamps)) is not None:
        return before
    made = fingerprint(source, revision=revision)
    kept_facts = ("files", "shapes", "norm", "verified")
    facts = json.dumps({"stamps": stamps, **{name: getattr(made, name) for name in kept_facts}})
    metadata = {"facts": facts, "sha256": _digest(facts, made.sketch)}
    with replacing(kept) as file:
        file.write(save({"sketch": made.sketch}, metadata=metadata))
    return made


def _digest(facts: str, sketch: NDArray[np.float64]) -> str:
    return hashlib.sha256(facts.encode() + sketch.tobytes()).hexdigest()


def _read(kept: Path, stamps: Mapping[str, list[int]]) -> Fingerprint | None:
    try:
        with safe_open(kept, framework="np") as file:
            metadata, sketch = file.metadata() or {}, file.get_tensor("sketch")
        facts = json.loads(metadata["facts"])
        if facts["stamps"] != stamps or metadata["sha256"] != _digest(metadata["facts"], sketch):
            return None
        shapes = {name: tuple(shape) for name, shape in facts["shapes"].items()}
        return Fingerprint(
            facts["files"], shapes, float(facts["norm"]), sketch, bool(facts["verified"])
        )
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None


def settings_hashes(
    source: str | Path, *, revision: str | None = None, tokenizer: str | Path | None = None
) -> dict[str, str]:
    """Return hashes of what else than its weights decides what a checkpoint computes.

    These are its config.json and the files of its tokenizer, or of the one given instead: as
    `joma.models.load_tokenizer` takes it. A file that is not there has no hash.
    """
    folder = local_folder(source, revision)
    if tokenizer is None:
        return _hashes(folder, tokenizer=True)
    found = _hashes(folder, tokenizer=False)
    path = Path(tokenizer)
    if path.is_file():
        return found | {"tokenizer": sha256(path)}
    if tokenizer == "bytes":
        return found
    # Its own config.json may say of what class a tokenizer is.
    other = _hashes(local_folder(tokenizer), tokenizer=True)
    return found | {f"tokenizer/{name}": digest for name, digest in other.items()}


def _hashes(folder: Path, *, tokenizer: bool) -> dict[str, str]:
    return {
        path.name: sha256(path)
        for path in sorted(folder.iterdir())
        if path.name == "config.json" or (tokenizer and is_tokenizer_file(path.name))
        if path.is_file()
    }


def _add(tensor: Tensor, name: str, sketch: NDArray[np.float64]) -> float:
    """Add a tensor to a sketch; return its Σ w²."""
    signs = np.random.PCG64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "big"))
    square = 0.0
    for part in tensor.reshape(-1).split(_AT_ONCE):
        folded = np.zeros(-(-len(part) // SKETCH_SIZE) * SKETCH_SIZE, dtype=np.float32)
        numbers = folded[: len(part)]
        numbers[:] = part.to(torch.float32).numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            partial = np.dot(numbers, numbers)
            if not np.isfinite(partial):  # or larger than float32 can say
                partial = np.square(numbers, dtype=np.float64).sum()
        square += float(partial)
        bits = np.unpackbits(signs.random_raw(-(-len(part) // 64)).view(np.uint8))[: len(part)]
        numbers *= 1 - 2 * bits.view(np.int8)
        sketch += folded.reshape(-1, SKETCH_SIZE).sum(0, dtype=np.float64)
    return square
