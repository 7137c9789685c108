"""Every claim states its domain, and the adversary sees what is wrong in a small part of it."""

import dataclasses

import pytest
from benchmarks.adversary import Twin
from benchmarks.adversary.__main__ import judge, share_wrong, twins

from joma.experiments.claims import CLAIMS, check

TWINS = twins()
_BY_ID = {claim.id: claim for claim in CLAIMS}
_SECONDS = 5.0
"""What `joma verify --adversary` gives a claim."""


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_has_a_search_and_a_twin_or_says_why_not(claim) -> None:
    assert (claim.search is None) == bool(claim.fixed)
    assert (claim.search is None) != any(twin.claim == claim.id for twin in TWINS)


def name(twin: Twin) -> str:
    return f"{twin.claim}: {twin.wrong[:40]}"


@pytest.mark.slow
@pytest.mark.parametrize("twin", TWINS, ids=name)
def test_a_twin_passes_plain_verification_is_nearly_right_and_falls(twin: Twin) -> None:
    record = judge(twin, _BY_ID[twin.claim], _SECONDS, seed=0)
    assert record["passes_plain"] == twin.plain
    assert record["violated"], record
    assert twin.was_ours or record["share_wrong"] <= 0.05 + 2 * (0.05 / record["draws"]) ** 0.5


@pytest.mark.parametrize("twin", [it for it in TWINS if it.was_ours], ids=name)
def test_what_this_package_once_stated_is_seen_to_be_wrong(twin: Twin) -> None:
    claim = _BY_ID[twin.claim]
    assert check(dataclasses.replace(claim, derived=twin.formula)).derived.holds == twin.plain
    wrong, tried = share_wrong(twin, claim, draws=40, seconds=120.0)
    assert wrong or judge(twin, claim, _SECONDS, seed=0)["violated"], tried
