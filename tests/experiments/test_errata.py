"""Errata: each is measured, each printed form has one, and the counts are of roots."""

import re

import pytest

from joma.errors import JomaError
from joma.experiments.claims import CLAIMS, errata
from joma.experiments.claims.errata import CLARIFICATIONS, DOCUMENTS, ERRATA, Erratum

IDS = {claim.id for claim in CLAIMS}
PRINTED = {claim.id for claim in CLAIMS if claim.printed is not None}

each_erratum = pytest.mark.parametrize("erratum", ERRATA, ids=lambda erratum: erratum.id)


def test_ids_are_anchors_and_named_once():
    ids = [erratum.id for erratum in ERRATA]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in ids)
    assert not set(ids) & IDS


@each_erratum
def test_a_claim_with_a_printed_form_measures_it(erratum: Erratum):
    assert set(erratum.claims) <= IDS
    assert set(erratum.claims) & PRINTED


def test_every_printed_form_belongs_to_an_erratum():
    assert sorted(PRINTED - {name for erratum in ERRATA for name in erratum.claims}) == []


@each_erratum
def test_a_root_is_a_slip_of_its_own(erratum: Erratum):
    roots = {other.id for other in ERRATA if not other.root}
    assert not erratum.root or erratum.root in roots


@each_erratum
def test_the_printed_statement_is_off_by_more_than_rounding(erratum: Erratum):
    assert 0.01 < erratum.relative_error() < 10


@each_erratum
def test_every_field_says_something(erratum: Erratum):
    texts = (erratum.place, erratum.printed, erratum.corrected, erratum.example)
    assert all(texts)
    assert erratum.printed != erratum.corrected
    assert erratum.derivation.endswith(".")
    assert erratum.consequence.endswith(".")


def test_a_document_that_was_not_checked_is_refused():
    with pytest.raises(JomaError, match="document must be one of"):
        Erratum("a", "GaLore", "", "", "", "", "", "", lambda: 0.0, ())


def test_counts_are_of_roots():
    assert errata.count("JoMA preprint", ERRATA) == "14 errata from 9 slips"
    assert errata.count("talk", ERRATA) == (
        "2 errata from 2 slips, 1 repeated from the JoMA preprint"
    )
    assert errata.count("CDAG draft note", ERRATA) == "1 erratum from 1 slip"
    assert errata.count("talk", errata.find(["lemma-5-sign"])) == "0 errata from 0 slips"
    assert tuple(errata.group(ERRATA)) == DOCUMENTS


def test_clarifications_name_documents_and_claims_that_exist():
    assert {remark.document for remark in CLARIFICATIONS} == set(DOCUMENTS)
    for remark in CLARIFICATIONS:
        assert set(remark.claims) <= IDS, remark.place
