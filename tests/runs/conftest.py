from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import _failing


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from _failing.small_disk(tmp_path / "small")
