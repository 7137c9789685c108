"""`joma verify --adversary`: what it prints and how it exits."""

import dataclasses
import json

import pytest

from joma.experiments import claims
from joma.experiments.claims import Claim, ClaimMeasurement
from joma.experiments.claims.claim import Point, Search
from joma.experiments.claims.search import Real
from joma.runs import Run
from tests.cli._command import joma, sentence


def measure(formula, point: Point) -> ClaimMeasurement:
    return ClaimMeasurement(abs(formula() - 2.0) * (point["x"] > 0.9), 1e-6)


@pytest.fixture
def searched(few_claims: tuple[Claim, ...], monkeypatch) -> Claim:
    """The first claim, with a search; the others have nothing to search."""
    first = dataclasses.replace(few_claims[0], search=Search({"x": Real(0, 1)}, measure))
    monkeypatch.setattr(claims, "CLAIMS", (first, *few_claims[1:]))
    return first


@pytest.mark.usefixtures("searched")
class TestStands:
    @pytest.mark.parametrize("words", [("--adversary", "0.05"), ("--adversary=0.05",)])
    def test_a_right_claim_stands(self, words):
        result = joma("verify", *words, "--claim", "right")
        assert result.exit_code == 0
        assert result.stdout.splitlines()[-1].startswith("0 of 1 claims fall in ")

    def test_the_number_may_be_left_out(self, monkeypatch):
        monkeypatch.setattr("joma.cli._verify.ATTACK_SECONDS", 1.0)
        monkeypatch.setattr("joma.experiments.claims.adversary.LONGEST", 1000.0)
        result = joma("verify", "--adversary", "--claim", "right", "--json")
        assert result.exit_code == 0
        [record] = json.loads(result.stdout)
        assert record["evaluations"] >= 1000
        assert record["enough"]
        assert not record["violated"]

    def test_the_records_are_kept_in_a_run_folder(self, tmp_path):
        words = ("--adversary", "0.05", "--claim", "right", "--json", "--out", str(tmp_path / "a"))
        result = joma("verify", *words)
        assert result.exit_code == 0
        assert Run.open(tmp_path / "a").read_json("attacks") == json.loads(result.stdout)

    def test_a_claim_without_parameters_is_said_to_have_none(self):
        result = joma("verify", "--adversary", "1", "--claim", "ours")
        assert result.stdout.splitlines()[-1].startswith("0 of 0 claims fall in 0 points; 1 ")

    @pytest.mark.parametrize("given", ["0", "x", "nan"])
    def test_seconds_must_be_positive(self, given: str):
        result = joma("verify", "--adversary", given)
        assert result.exit_code == 2
        assert "must be a positive number" in sentence(result)


def test_a_wrong_claim_falls_with_its_parameters(searched: Claim, monkeypatch):
    wrong = dataclasses.replace(searched, derived=lambda: 2.5)
    monkeypatch.setattr(claims, "CLAIMS", (wrong,))
    result = joma("verify", "--adversary", "20")
    assert result.exit_code == 1
    assert "✗ falls: 5e+05" in result.stdout
    assert "x = 0.9" in result.stdout or "x = 1" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("1 of 1 claims falls in ")


def test_too_few_points_are_named(searched: Claim, monkeypatch):
    import time

    def slow(formula, point: Point) -> ClaimMeasurement:
        time.sleep(0.01)
        return ClaimMeasurement(0.0, 1.0)

    search = Search({"x": Real(0, 1)}, slow)
    slowly = dataclasses.replace(searched, search=search)
    monkeypatch.setattr(claims, "CLAIMS", (slowly,))
    result = joma("verify", "--adversary", "0.1")
    assert result.exit_code == 0
    assert "too few to speak of a search: right." in result.stdout
