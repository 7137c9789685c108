"""Every claim is checked, and every check can fail."""

import dataclasses

import pytest

from joma.experiments.claims import CLAIMS, Claim, check
from tests.experiments.broken import BROKEN

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
