"""Model files made to do harm: damaged, lying about themselves, or far larger than they seem.

Every case writes files below a folder and returns what to load. The random ones are drawn from a
fixed seed, so that a case keeps its name and its bytes.
"""

from collections.abc import Iterator

from tests.models.hostile.base import Case, Valid
from tests.models.hostile.configurations import configurations
from tests.models.hostile.single_files import single_files
from tests.models.hostile.tokenizer_files import tokenizer_files
from tests.models.hostile.weights import weights

__all__ = ["Case", "Valid", "cases"]


def cases(valid: Valid) -> Iterator[Case]:
    """Yields every case, the families one after the other."""
    for family in (weights, configurations, tokenizer_files, single_files):
        yield from family(valid)
