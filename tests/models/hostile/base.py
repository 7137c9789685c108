"""What a hostile file is, and how files are damaged."""

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Make = Callable[[Path], Path]


@dataclass(frozen=True)
class Case:
    """A hostile file.

    Attributes:
        name: What it is called in reports, family first.
        make: Writes it below a folder and returns what to load.
        quick: Whether it is among the few that are run every time.
    """

    name: str
    make: Make
    quick: bool = False


@dataclass(frozen=True)
class Valid:
    """Files that load: what hostile ones are made from.

    Attributes:
        folder: A model in Hugging Face layout with a tokenizer.
        gguf: A GGUF file.
        llama2c: A llama2.c checkpoint with its tokenizer behind the weights.
    """

    folder: Path
    gguf: Path
    llama2c: Path

    def copy(self, place: Path) -> Path:
        """Copies the folder below a place."""
        return Path(shutil.copytree(self.folder, place / "model"))


def edited(valid: Valid, file: str, content: bytes) -> Make:
    def make(place: Path) -> Path:
        folder = valid.copy(place)
        (folder / file).write_bytes(content)
        return folder

    return make


def damaged(path: Path, name: str, head: int, flips: int, cuts: int) -> Iterator[tuple[str, bytes]]:
    """Yields copies of a file with bytes of its first `head` changed, and copies cut short."""
    data = path.read_bytes()
    draw = random.Random(f"{name} {len(data)}")
    for number in range(flips):
        changed = bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 8))):
            changed[draw.randrange(min(head, len(data)))] = draw.choice(
                (0, 255, draw.randrange(256))
            )
        yield f"{name} changed {number}", bytes(changed)
    for number in range(cuts):
        yield f"{name} cut {number}", data[: draw.randrange(len(data))]
