"""A language model's training really killed: it ends as if nothing had happened."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from joma.runs import Run
from tests.train import _child
from tests.train._child import Children, after, written
from tests.train._language import begin, ended, make, write_text

CHECKPOINT, PART = r"step-\d+\.safetensors", r"part-\d+\.parquet"


class LanguageChildren(Children):
    """Processes that train a language model, forked from one that has imported torch."""

    MODULE = "tests.train.test_language_killed"


def _live(folder: Path) -> None:
    """What a forked process does."""
    _child._say("process", os.getpid())
    begin(make(folder.parent / "text", "gpt2"), folder)


def exporting(series: Path, step: int) -> Callable[[], bool]:
    """The moment at which a model is being written."""
    return lambda: any(series.glob(f".step-{step:06d}.tmp/*"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    write_text(folder / "text")
    return folder


@pytest.fixture(scope="module")
def children(place: Path) -> Iterator[Children]:
    if not hasattr(os, "fork"):
        pytest.skip("processes cannot be forked here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JOMA_CACHE", str(place / "cache"))
        made = LanguageChildren()
        yield made
        made.close()


def test_killed_at_random_moments(children: Children, place: Path):
    assert children.live(place / "straight") == 0
    moments = random.Random(0)
    folder, kills = place / "0", 0
    for life in range(1, 30):
        doom = moments.choice(
            [
                after(moments.uniform(0, 0.3), folder),
                written(folder / "checkpoints", CHECKPOINT, moments.randrange(1, 5)),
                written(folder / "metrics", PART, moments.randrange(1, 5)),
                exporting(folder / "series", 8),
            ]
        )
        if children.live(folder, doom) == -signal.SIGKILL:
            kills += 1
        else:  # the end came before its moment: once more
            assert ended(folder) == ended(place / "straight")
            folder = place / str(life)
        if kills == 3:
            break
    assert kills == 3
    assert children.live(folder) == 0
    assert ended(folder) == ended(place / "straight")
    assert not list(folder.rglob("*.tmp"))
    assert Run.open(folder).environment.get("resumed")


if __name__ == "__main__":
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401  (here and not in every process)

    _child._live = _live
    _child._serve()
