"""Every claim is checked, and every check can fail."""

import dataclasses

import pytest

from joma.experiments.claims import CLAIMS, Claim, check
from joma.experiments.claims.claim import Point
from joma.theory import clusters
from tests.experiments import (
    broken_cdag,
    broken_clusters,
    broken_critical,
    broken_embeddings,
    broken_galore,
    broken_hblt,
    broken_joint,
    broken_linear,
    broken_nonlinear,
    broken_rates,
    broken_scan_snap,
)

BROKEN = {
    **broken_joint.BROKEN,
    **broken_embeddings.BROKEN,
    **broken_linear.BROKEN,
    **broken_clusters.BROKEN,
    **broken_critical.BROKEN,
    **broken_nonlinear.BROKEN,
    **broken_rates.BROKEN,
    **broken_hblt.BROKEN,
    **broken_cdag.BROKEN,
    **broken_scan_snap.BROKEN,
    **broken_galore.BROKEN,
}

each_claim = pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)


def test_claims_are_many_and_named_once():
    ids = [claim.id for claim in CLAIMS]
    assert len(ids) >= 25
    assert len(ids) == len(set(ids))


def test_every_claim_has_a_broken_twin():
    assert set(BROKEN) == {claim.id for claim in CLAIMS}


@each_claim
def test_derived_holds_and_a_printed_form_that_differs_does_not(claim: Claim):
    verdict = check(claim)
    assert verdict.derived.holds
    if claim.printed is not None:
        assert verdict.printed is not None
        assert not verdict.printed.holds
        if verdict.printed.standard_error is not None:
            assert verdict.printed.error > 10 * verdict.printed.standard_error
    if verdict.without is not None:
        assert not verdict.without.holds


@each_claim
def test_a_wrong_constant_fails(claim: Claim):
    broken = dataclasses.replace(claim, derived=BROKEN[claim.id])
    assert not check(broken).derived.holds


def test_the_search_of_phases_sees_a_tail_that_is_a_little_heavier():
    (claim,) = (one for one in CLAIMS if one.id == "thm3-phase")
    assert claim.search is not None
    values = {"family": "student", "df": 3.0, "other": "student", "other_df": 3.1}
    point = Point({**values, "negative": 1.0, "distance": 1.0, "ratio": 5.0, "cosine": 0.0})
    assert claim.search.measure(claim.derived, point).holds
    bounded = clusters.Phase(3.85, 0.0, grows=False)
    assert not claim.search.measure(lambda *_, **__: bounded, point).holds
