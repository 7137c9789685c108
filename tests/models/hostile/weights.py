"""Files of weights: safetensors, indexes of shards, pickles."""

import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.hostile.base import Case, Make, Valid, damaged, edited


def weights(valid: Valid) -> Iterator[Case]:
    """Yields the cases."""
    for family in (_safetensors, _dtypes, _indexes, _pickles):
        yield from family(valid)


def _safetensors(valid: Valid) -> Iterator[Case]:
    file = "model.safetensors"
    data = (valid.folder / file).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    first = next(name for name in header if name != "__metadata__")

    def with_header(raw: bytes, tail: bytes = rest) -> Make:
        return edited(valid, file, len(raw).to_bytes(8, "little") + raw + tail)

    def with_entry(entry: Any) -> Make:
        return with_header(json.dumps({**header, first: entry}).encode())

    whole = header[first]
    for number, offsets in enumerate(([0], [0, 1, 2], [1, 0], [-4, 0], [0, 2**64], None)):
        made = with_entry({**whole, "data_offsets": offsets})
        yield Case(f"safetensors offsets {number}", made, number < 3)
    shapes = ([-1], [0], [2**62, 2**62], [2**63], [1e300], ["1"], None, {}, [[1]], [1] * 10_000)
    for number, shape in enumerate(shapes):
        yield Case(f"safetensors shape {number}", with_entry({**whole, "shape": shape}), number > 8)
    for number, kind in enumerate(("F4", "C64", "X", None, 3, "I128")):
        yield Case(f"safetensors dtype {number}", with_entry({**whole, "dtype": kind}), number < 2)
    for number, entry in enumerate((None, [], 3, {}, [whole], {"a": whole})):
        yield Case(f"safetensors entry {number}", with_entry(entry))
    for number, metadata in enumerate(([1], None, {"a": 1})):
        changed = json.dumps({**header, "__metadata__": metadata}).encode()
        yield Case(f"safetensors metadata {number}", with_header(changed), number == 0)
    renamed = ("\x1b[2J\x1b]0;x\x07", "", "a" * 100_000, "../x", "\ud800", "\u202e", "model\0norm")
    for number, name in enumerate(renamed):
        moved = {key if key != first else name: entry for key, entry in header.items()}
        made = with_header(json.dumps(moved).encode())
        yield Case(f"safetensors name {number}", made, number == 0)
    raws = (b"", b"{}", b"[]", b"null", b"[" * 10**5, b'{"a":' * 10**5, b"\xff", b"9" * 5000)
    for number, raw in enumerate(raws):
        yield Case(f"safetensors header {number}", with_header(raw), number in (0, 4))
    many = {f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(10**5)}
    yield Case("safetensors 100,000 empty tensors", with_header(json.dumps(many).encode(), b""))
    for number, size in enumerate((0, 7, 9, 2**31, 2**63, 2**64 - 1)):
        made = edited(valid, file, size.to_bytes(8, "little") + data[8:])
        yield Case(f"safetensors length {number}", made)
    yield Case("safetensors longer", edited(valid, file, data + b"\0"), True)
    yield Case("safetensors empty", edited(valid, file, b""), True)
    for name, content in damaged(valid.folder / file, "safetensors", 8 + length, 90, 20):
        yield Case(name, edited(valid, file, content))


def _dtypes(valid: Valid) -> Iterator[Case]:
    state = load_file(valid.folder / "model.safetensors")

    def saved(change: Callable[[dict[str, torch.Tensor]], Any]) -> Make:
        def make(place: Path) -> Path:
            folder = valid.copy(place)
            changed = {name: tensor.clone() for name, tensor in state.items()}
            change(changed)
            save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
            return folder

        return make

    norm, gate = "model.norm.weight", "model.layers.1.mlp.gate_proj.weight"

    def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
        return lambda changed: changed.update({name: tensor})

    whole, matrix = state[norm], state[gate]
    tensors = {
        "NaN norm": (norm, torch.full_like(whole, torch.nan)),
        "infinite norm": (norm, torch.full_like(whole, torch.inf)),
        "complex": (gate, matrix.to(torch.complex64)),
        "bool": (gate, matrix > 0),
        "float8": (gate, matrix.to(torch.float8_e4m3fn)),
        "three axes": (gate, matrix[None]),
        "transposed": (gate, matrix.T.contiguous()),
        "empty": (gate, torch.zeros(0)),
        "a layer of 20 digits": ("model.layers.99999999999999999999.mlp.gate_proj.weight", matrix),
        "escapes": ("model.layers.0.\x1b[31mred.weight", matrix),
    }
    for name, (place, tensor) in tensors.items():
        quick = name in ("NaN norm", "complex", "escapes")
        yield Case(f"weights {name}", saved(put(place, tensor)), quick)
    yield Case("weights none", saved(lambda changed: changed.clear()), True)
    yield Case("weights one", saved(lambda changed: [changed.pop(k) for k in list(changed)[1:]]))


def _indexes(valid: Valid) -> Iterator[Case]:
    names = list(load_file(valid.folder / "model.safetensors"))

    def index(content: Any, kind: str = "model.safetensors") -> Make:
        def make(place: Path) -> Path:
            folder = valid.copy(place)
            os.replace(folder / "model.safetensors", folder / "part.safetensors")
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            (folder / f"{kind}.index.json").write_bytes(raw)
            return folder

        return make

    good = dict.fromkeys(names, "part.safetensors")
    contents: list[Any] = [b"", b"{", b"[]", b"[" * 10**5, b"\xff\xfe", {}, {"weight_map": 3}]
    contents += [{"weight_map": value} for value in ([], {}, None, "x", {"a": None}, {"a": []})]
    for file in ("../x", "/etc/passwd", "", "..", "a/b", "\0", "x" * 5000, "config.json",
                 "missing.safetensors", "\x1b[2J.safetensors", "part.safetensors\n"):  # fmt: skip
        contents.append({"weight_map": {**good, names[0]: file}})
    contents.append({"weight_map": {**good, "\x1b[2J": "part.safetensors"}})
    contents.append({"weight_map": {names[0]: "part.safetensors"}})
    contents.append({"weight_map": {f"t{n}": "part.safetensors" for n in range(10**5)}})
    contents.append({"weight_map": {f"t{n}": f"{n}.safetensors" for n in range(10**4)}})
    for number, content in enumerate(contents):
        yield Case(f"index {number}", index(content), number in (1, 13, 17, 22))
        if number % 4 == 0:
            yield Case(f"index of pickles {number}", index(content, "pytorch_model.bin"))


class _Calls:
    """Calls a function where it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.called = function, arguments

    def __reduce__(self) -> Any:
        return self.called


def _pickles(valid: Valid) -> Iterator[Case]:
    state = load_file(valid.folder / "model.safetensors")
    gate = "model.layers.1.mlp.gate_proj.weight"
    file = "pytorch_model.bin"

    def folder_with(write: Callable[[Path], Any]) -> Make:
        def make(place: Path) -> Path:
            folder = valid.copy(place)
            (folder / "model.safetensors").unlink()
            write(folder / file)
            return folder

        return make

    def saved(content: Any, **options: Any) -> Make:
        return folder_with(lambda path: torch.save(content, path, **options))

    trap = str(valid.folder.parent / "trapped")
    functions: tuple[tuple[Any, ...], ...] = (
        (os.mkdir, trap), (os.system, f"mkdir {trap}"), (eval, f"__import__('os').mkdir({trap!r})"),
        (bytearray, 10**11), (list, range(10**10)), (torch.zeros, 10**10), (open, trap, "w"),
    )  # fmt: skip
    for number, (function, *arguments) in enumerate(functions):
        poisoned = {**state, "x": _Calls(function, *arguments)}
        yield Case(f"pickle calls {number}", saved(poisoned), number == 0)
        plain = pickle.dumps(poisoned["x"])
        yield Case(f"pickle calls {number}, bare", folder_with(lambda p, b=plain: p.write_bytes(b)))
    one = torch.ones(1)
    values: dict[str, Any] = {
        "expanded": one.expand(40, 24),
        "expanded a lot": one.expand(10**6, 10**6),
        "complex": state[gate].to(torch.complex64),
        "sparse": torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.long), one, (10**6, 10**6)),
        "quantized": torch.quantize_per_tensor(state[gate], 0.1, 0, torch.qint8),
        "meta": torch.empty(10**6, 10**6, device="meta"),
        "a list": [1, 2],
        "nested": {"a": {"b": state[gate]}},
        "number": 3,
        "NaN": state[gate] * torch.nan,
    }
    for name, value in values.items():
        yield Case(f"pickle {name}", saved({**state, gate: value}), name.startswith("expanded"))
    shared = {name: one.expand(tensor.shape) for name, tensor in state.items()}
    yield Case("pickle one number shared by all", saved(shared))
    for number, content in enumerate(([], {}, None, "x", state[gate], {1: state[gate]})):
        yield Case(f"pickle of another thing {number}", saved(content))

    def compressed(path: Path) -> None:
        torch.save({**state, gate: torch.zeros(5 * 10**7)}, path)
        with zipfile.ZipFile(path) as old:
            entries = {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
            for name, content in entries.items():
                new.writestr(name, content)

    yield Case("pickle compressed", folder_with(compressed))
    torch.save(state, valid.folder.parent / "good.bin")
    for name, content in damaged(valid.folder.parent / "good.bin", "pickle", 3000, 25, 8):
        yield Case(name, folder_with(lambda path, b=content: path.write_bytes(b)))
    for number, raw in enumerate((b"", b"PK", b"\x80\x02.", b"\x80\x04" + b"(" * 10**5)):
        yield Case(f"pickle raw {number}", folder_with(lambda path, b=raw: path.write_bytes(b)))
