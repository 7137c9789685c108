"""Errata: each is measured, each printed form has one, and the counts are of roots."""

import re

import numpy as np
import pytest

from joma.errors import JomaError
from joma.experiments.claims import CLAIMS, errata
from joma.experiments.claims.errata import CLARIFICATIONS, DOCUMENTS, ERRATA, Erratum, examples
from joma.theory import as_printed, cdag, clusters, embeddings, galore, hblt, linear, nonlinear
from joma.theory.marginals import Gaussian, StudentT

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


def test_every_source_names_the_document_that_was_checked():
    for claim in CLAIMS:
        assert claim.source == "new" or claim.source.startswith(
            tuple(f"{document}, " for document in DOCUMENTS)
        ), claim.id


@each_erratum
def test_a_root_is_a_slip_of_its_own(erratum: Erratum):
    roots = {other.id for other in ERRATA if not other.root}
    assert not erratum.root or erratum.root in roots


@each_erratum
def test_the_printed_statement_is_off_by_more_than_rounding(erratum: Erratum):
    assert 0.01 < erratum.relative_error() < 10


@each_erratum
def test_every_field_says_something(erratum: Erratum):
    texts = (erratum.place, erratum.printed, erratum.corrected, erratum.quantity, erratum.example)
    assert all(texts)
    assert erratum.printed != erratum.corrected
    assert erratum.derivation.endswith(".")
    assert erratum.consequence.endswith(".")


def test_a_document_that_was_not_checked_is_refused():
    with pytest.raises(JomaError, match="document must be one of"):
        Erratum("a", "a", "GaLore", "", "", "", "", "", "", "", lambda: 0.0, ())


def test_counts_are_of_roots():
    assert errata.count("JoMA preprint", ERRATA) == "14 errata from 9 slips"
    assert errata.count("talk", ERRATA) == ("1 erratum, repeated from the JoMA preprint")
    assert errata.count("CDAG draft note", ERRATA) == "1 erratum from 1 slip"
    assert errata.count("talk", errata.find(["lemma-5-sign"])) == "0 errata from 0 slips"
    assert tuple(errata.group(ERRATA)) == DOCUMENTS


def test_clarifications_name_documents_and_claims_that_exist():
    assert {remark.document for remark in CLARIFICATIONS} == set(DOCUMENTS)
    for remark in CLARIFICATIONS:
        assert set(remark.claims) <= IDS, remark.place


def test_the_example_on_the_galore_slide():
    """G = A − (2 − w)w on 0 ≤ w ≤ ½: the slide's 3/2 − L_B L_C D², with L_C = 0, against 1."""
    assert galore.varying_rate([1.5], [0.0], [1.0], [0.0], 0.5, [2.0], [1.0]) == 1


class TestExamples:
    """The examples, made without `joma.theory`, agree with its derived and printed functions."""

    def test_theorem_1_under_cross_entropy(self):
        """Linear activation and cross-entropy: the printed condition is 0 = 0, Eqn 17 fails."""
        rng = np.random.default_rng(0)
        b, v = rng.dirichlet(np.ones(5), size=8), rng.normal(size=(3, 5))
        likely = np.exp(b @ v.T)
        g = np.eye(3)[rng.integers(0, 3, size=8)] - likely / likely.sum(axis=1, keepdims=True)
        together = g.sum(axis=1)
        assert np.max(np.abs(np.einsum("i,ij,il->jl", together, b, b))) < 1e-14
        assert np.max(np.abs(together @ b)) < 1e-14
        growth = np.einsum("ik,ij->kj", g, b) / 8 * v  # v̇_k∘v_k
        velocity = growth.sum(axis=0) - np.einsum("ik,ij,il,kl->j", g, b, b, v) / 8
        predicted = growth.sum(axis=0) - b.mean(axis=0) * growth.sum()
        assert np.linalg.norm(predicted - velocity) > 0.1 * np.linalg.norm(velocity)

    def test_theorem_2(self):
        loser = linear.limit([1.0, 0.5])[1]
        far = (1 + examples.loser_limit()) * loser
        conserved = as_printed.conserved_ratio([0.5], [far])
        assert conserved[0] == pytest.approx(1.0)  # erf = 1 of the winner, over its Δ

    def test_lemma_1(self):
        node = ([0.5, 0.0], [0.0, 0.0], 1.0)
        printed, derived = (
            module.expectations(Gaussian(), *node).activity for module in (as_printed, clusters)
        )
        assert printed == pytest.approx(1.683, abs=1e-3)
        assert printed / derived - 1 == pytest.approx(examples.firing_probability())

    def test_lemma_2_and_eqn_53(self):
        node = (Gaussian(), [1.0, -0.5], np.array([[1.0, 0.0], [0.0, 0.0]]), [2.0, 0.0], -1.0)
        printed, derived = (module.velocity(*node) for module in (as_printed, clusters))
        assert 1 - printed.bias / derived.bias == pytest.approx(examples.bias_velocity())
        printed, derived = (
            module.radial_velocity(*node) - module.velocity(*node).bias
            for module in (as_printed, clusters)
        )  # v·v̇ + ξξ̇ with ξ = -1
        assert abs(printed / derived - 1) == pytest.approx(examples.radial_velocity())

    def test_theorem_3(self):
        (point,) = clusters.critical_points(StudentT(3), 2.0)
        printed, derived = (
            module.jacobian(StudentT(3), point).longitudinal for module in (as_printed, clusters)
        )
        assert abs(printed / derived - 1) == pytest.approx(examples.longitudinal_eigenvalue())

    def test_lemma_5(self):
        printed, derived = (
            module.homogeneous_slopes(Gaussian(), 0.3, slopes=(0.1, 1.0))[0]
            for module in (as_printed, clusters)
        )
        assert printed / derived - 1 == pytest.approx(examples.leaky_slope())

    def test_theorem_4(self):
        paper = np.sqrt(2 * np.pi) + 2
        sharp = nonlinear.settled_threshold(1e-9)
        derived = nonlinear.settled_threshold(2.0) / sharp * -paper
        error = 1 - as_printed.settled_threshold(2.0) / derived
        assert error == pytest.approx(examples.settling_threshold())

    def test_superposition(self):
        patterns, queries = np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])
        printed, derived = (
            module.superposed(patterns, queries, np.array([-0.5])) @ [1.0, 1.0]
            for module in (as_printed, embeddings)
        )
        assert printed / derived - 1 == pytest.approx(examples.superposed_activation())

    def test_theorem_5_and_eqn_8(self):
        off = np.array([0.0] + [1.0] * 9)
        printed, derived = (
            hblt.cooccurrence(1, 4, 0.9, module.root_uncertainty(np.full(10, 0.1), off))
            for module in (as_printed, hblt)
        )
        assert abs(printed / derived - 1) == pytest.approx(examples.cooccurrence())
        exact = hblt.cooccurrence(1, 10, 0.95, 0.95)
        printed = as_printed.cooccurrence_near_one(1, 10, 0.05)
        assert abs(printed / exact - 1) == pytest.approx(examples.near_one())

    def test_the_note(self):
        turns = np.pi / 3 * np.array([1, 0, -1, 0])  # σ′g, z_α, z_β, f
        gradient, alpha, beta, child = np.column_stack([np.cos(turns), np.sin(turns)])
        assert cdag.corr(alpha, gradient) == pytest.approx(0.5)
        assert cdag.corr(beta, child) == pytest.approx(0.5)
        assert cdag.corr(alpha, beta) == pytest.approx(0.5)
        reached = cdag.corr(child, gradient) * cdag.corr(beta, gradient)
        assert reached == pytest.approx(-0.25)
