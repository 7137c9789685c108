"""The laboratory's JavaScript agrees with `joma.theory` on the grid that its page states."""

import json
from importlib import resources

import numpy as np
import pytest

from tests.report.laboratory import _grid
from tests.report.laboratory._node import evaluate, needs_node, numbers

STATED = json.loads(
    (resources.files("joma.report.laboratory") / "assets" / "agreement.json").read_text()
)


@needs_node
@pytest.mark.skipif(
    bool(np.finfo(np.longdouble).eps > 1e-18),
    reason="next to a blow-up the package is this exact only with a long double of 80 bits",
)
def test_closed_forms_agree_with_the_package_to_what_the_page_states():
    parts = _grid.parts()
    found = iter(evaluate([call for part in parts for call in part.calls]))
    worst = {
        part.name: _grid.largest_difference(part, [numbers(next(found)) for _ in part.calls])
        for part in parts
    }
    assert max(worst.values()) <= STATED["largest"] <= 1e-9, worst
    assert sum(part.points for part in parts) == STATED["points"]
