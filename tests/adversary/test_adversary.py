"""No search finds a point at which a claim fails, and every search finds a wrong formula."""

import dataclasses

import pytest

from joma.experiments.claims import CLAIMS, check
from tests.adversary import blocks, clusters, galore, hblt, linear, nonlinear, scan_snap
from tests.adversary.domains import SEARCHES
from tests.adversary.twins import TWINS, Twin

TOPICS = (blocks, clusters, galore, hblt, linear, nonlinear, scan_snap)
"""Importing a topic registers its searches."""

BY_ID = {claim.id: claim for claim in CLAIMS}


def test_every_search_is_of_a_claim():
    assert set(SEARCHES) <= set(BY_ID)


@pytest.mark.slow
@pytest.mark.parametrize("claim", sorted(SEARCHES))
def test_no_point_breaks_the_claim(claim: str):
    SEARCHES[claim].attack(BY_ID[claim].derived, examples=300)


@pytest.mark.slow
@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: f"{twin.claim}: {twin.wrong}")
def test_a_twin_passes_the_check_and_falls_to_the_search(twin: Twin):
    claim = dataclasses.replace(BY_ID[twin.claim], derived=twin.formula)
    assert check(claim).derived.holds
    with pytest.raises(AssertionError):
        SEARCHES[twin.claim].attack(twin.formula, examples=3000)
