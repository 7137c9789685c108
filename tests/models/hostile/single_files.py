"""Models in one file, GGUF and llama2.c, and what is no file."""

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.models.hostile.base import Case, Make, Valid, damaged


def single_files(valid: Valid) -> Iterator[Case]:
    """Yields the cases."""
    for family in (_gguf, _llama2c, _kinds_of_files):
        yield from family(valid)


def _file(name: str, content: bytes) -> Make:
    def make(place: Path) -> Path:
        (place / name).write_bytes(content)
        return place / name

    return make


def _gguf(valid: Valid) -> Iterator[Case]:
    data = valid.gguf.read_bytes()

    def entry(name: bytes, kind: int, value: bytes) -> bytes:
        return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value

    def header(tensors: int, entries: int, body: bytes = b"") -> bytes:
        return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + body

    named = entry(b"general.architecture", 8, struct.pack("<Q", 5) + b"llama")
    yield Case("gguf of 60 bytes", _file("model.gguf", header(0, 1, named)), True)
    for number, (tensors, entries) in enumerate(((2**63, 0), (0, 2**63), (10**5, 0), (1, 1))):
        made = _file("model.gguf", header(tensors, entries))
        yield Case(f"gguf counts {number}", made, number == 0)
    for number, (kind, length) in enumerate(((4, 2**60), (8, 2**60), (9, 2), (99, 1), (0, 10**6))):
        body = named + entry(b"tokenizer.ggml.tokens", 9, struct.pack("<IQ", kind, length))
        yield Case(f"gguf array {number}", _file("model.gguf", header(0, 2, body)))
    body = named + entry(b"x", 9, struct.pack("<IQ", 0, 10**7)) + bytes(10**7)
    yield Case("gguf array of ten million", _file("model.gguf", header(0, 2, body)))
    for key in ("llama.block_count", "llama.context_length", "llama.feed_forward_length",
                "llama.attention.head_count", "tokenizer.ggml.model"):  # fmt: skip
        at = data.find(key.encode()) + len(key) + 4
        assert at > len(key) + 4, key
        for number, value in enumerate((0, 1, 10**6, 2**31, 2**32 - 1)):
            content = data[:at] + struct.pack("<I", value) + data[at + 4 :]
            quick = key == "llama.block_count" and number == 3
            yield Case(f"gguf {key} {number}", _file("model.gguf", content), quick)
    wide = struct.pack("<IQ", 10, 2**62)
    for key in ("llama.context_length", "llama.block_count"):
        at = data.find(key.encode()) + len(key)
        content = data[:at] + wide + data[at + 8 :]
        yield Case(f"gguf {key} 2**62", _file("model.gguf", content), True)
    for name, content in damaged(valid.gguf, "gguf", 5500, 60, 20):
        yield Case(name, _file("model.gguf", content))


def _llama2c(valid: Valid) -> Iterator[Case]:
    data = valid.llama2c.read_bytes()
    fields = list(struct.unpack("<7i", data[:28]))
    for place in range(7):
        for number, value in enumerate((0, -1, 1, 3, 2**20, 2**31 - 1, -(2**31))):
            changed = [*fields[:place], value, *fields[place + 1 :]]
            content = struct.pack("<7i", *changed) + data[28:]
            yield Case(f"llama2.c field {place} {number}", _file("model.bin", content), number == 5)

    def layers(count: int) -> Make:
        def make(place: Path) -> Path:
            with open(place / "model.bin", "wb") as file:
                file.write(struct.pack("<7i", 2, 1, count, 1, 1, 300, 4))
                file.truncate(28 + 4 * (300 * 2 + count * 26 + 2 + 2 * 4))
            return place / "model.bin"

        return make

    yield Case("llama2.c of 200,000 layers", layers(200_000), True)
    yield Case("llama2.c of 2,048 layers", layers(2048))
    for number, raw in enumerate((b"", b"x", b"\0" * 28, b"\xff" * 28, b"ak42" + bytes(60))):
        yield Case(f"llama2.c raw {number}", _file("model.bin", raw), number == 3)
    tails = [b"\0", b"\0" * 10, b"\xff" * 1000]
    tails += [struct.pack("<ifi", 1, *entry) for entry in ((1.0, 2**31 - 1), (float("nan"), 1))]
    for number, tail in enumerate(tails):
        yield Case(f"llama2.c tokenizer {number}", _file("model.bin", data + tail))
    for name, content in damaged(valid.llama2c, "llama2.c", 28, 10, 20):
        yield Case(name, _file("model.bin", content))


def _kinds_of_files(valid: Valid) -> Iterator[Case]:
    def instead(file: str, put: Callable[[Path], Any]) -> Make:
        def make(place: Path) -> Path:
            folder = valid.copy(place)
            (folder / file).unlink()
            put(folder / file)
            return folder

        return make

    def loop(path: Path) -> None:
        path.symlink_to(path)

    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        yield Case(f"{file} a folder", instead(file, Path.mkdir), file == "config.json")
        yield Case(f"{file} a pipe", instead(file, os.mkfifo), file == "config.json")
        yield Case(f"{file} a loop", instead(file, loop))
        yield Case(f"{file} a device", instead(file, lambda path: path.symlink_to("/dev/zero")))
    yield Case("an empty folder", lambda place: place)
    yield Case("a path too long", lambda place: place / ("x" * 5000))
    yield Case("a name of odd characters", lambda place: place / "\udcff\x1b[2J")
