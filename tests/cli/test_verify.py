"""`joma verify`: what it prints, what it writes and how it exits."""

import dataclasses
import json
from pathlib import Path

import pytest

from joma.experiments import claims
from joma.experiments.claims import ClaimMeasurement
from joma.runs import Run
from tests.cli._command import joma, sentence


@pytest.mark.usefixtures("few_claims")
class TestVerify:
    def test_table_errata_and_summary(self):
        result = joma("verify")
        assert result.exit_code == 0
        for text in ("right", "✓ 0", "✗ 1.0e+00", "≤ 1.0e-06"):
            assert text in result.stdout
        assert "  JoMA preprint: 2 errata from 1 slip\n" in result.stdout
        assert "    eqn-2-three: Eqn 2. Printed: three. Corrected: two.\n" in result.stdout
        assert "      eqn-3-three (follows from eqn-2-three): Eqn 2." in result.stdout
        repeated = "1 erratum, repeated from the JoMA preprint"
        assert f"  talk: {repeated}\n" in result.stdout
        last = result.stdout.splitlines()[-1]
        assert last.startswith("3 of 3 claims hold as derived; 1 of 2 printed forms does not hold.")
        assert not Path("runs").exists()

    def test_a_narrow_terminal_loses_nothing(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        result = joma("verify")
        for text in ("misprinted", "✗ 1.0e+00", "≤ 1.0e-06"):
            assert text in result.stdout
        assert max(map(len, result.stdout.splitlines())) <= 80

    @pytest.mark.parametrize("columns", ["80", "140"])
    def test_a_sampled_verdict_quotes_its_standard_error(
        self, monkeypatch, few_claims, columns: str
    ):
        monkeypatch.setenv("COLUMNS", columns)
        sampled = dataclasses.replace(
            few_claims[0], measure=lambda *_: ClaimMeasurement(4.8e-3, 8.4e-3, 2.1e-3)
        )
        monkeypatch.setattr(claims, "CLAIMS", (sampled, *few_claims[1:]))
        text = joma("verify").stdout
        assert text.count("(SE 2.1e-03)") == 1
        assert "✓ 4.8e-03 ≤ 8.4e-03" in text
        assert "≤ 8.4e-03 (SE 2.1e-03)" in text

    def test_list(self):
        lines = joma("verify", "--list").stdout.splitlines()
        assert [line.split() for line in lines[2:]] == [
            ["right", "JoMA", "Eqn", "1", "two"],
            ["misprinted", "JoMA", "Eqn", "2", "two"],
            ["ours", "new", "two"],
        ]
        records = json.loads(joma("verify", "--list", "--json", "--claim", "ours").stdout)
        assert records == [{"claim": "ours", "title": "two", "source": "new"}]

    def test_json_is_all_there_is(self):
        result = joma("verify", "--json", "--claim", "ours", "--claim", "misprinted")
        records = json.loads(result.stdout)
        assert [record["claim"] for record in records] == ["misprinted", "ours"]
        assert records[0]["printed"] == {"holds": False, "error": 1.0}
        assert records[0]["errata"] == ["eqn-2-three", "eqn-3-three", "slide-three"]
        assert "errata" not in records[1]
        assert records[1]["printed"] is None

    def test_a_failing_claim_exits_with_1(self, monkeypatch, few_claims):
        wrong = dataclasses.replace(few_claims[0], derived=lambda: 2.5)
        monkeypatch.setattr(claims, "CLAIMS", (wrong, *few_claims[1:]))
        result = joma("verify")
        assert result.exit_code == 1
        assert "2 of 3 claims hold" in result.stdout
        assert joma("verify", "--claim", "ours").exit_code == 0

    def test_an_unknown_claim_gets_one_sentence(self):
        line = sentence(joma("verify", "--claim", "rigt"))
        assert line.startswith("joma: there is no claim 'rigt'; the closest are right, ")
        assert line.endswith("`joma verify --list` lists all")

    def test_plot_makes_a_run_folder(self):
        result = joma("verify", "--plot", "--out", "here", "--seed", "5")
        assert result.exit_code == 0
        run = Run.open("here")
        assert run.config == {
            "name": "verify",
            "seed": 5,
            "claims": ["right", "misprinted", "ours"],
        }
        assert [path.name for path in run.figures] == ["verify.png", "verify.svg"]
        assert len(run.read_json("verdicts")) == 3
        assert run.read_json("outcome")["status"] == "done"
        assert f"Picture: {Path('here/figures/verify.png')}" in result.stdout

    def test_plot_with_json_keeps_standard_output_clean(self):
        result = joma("verify", "--plot", "--json")
        assert len(json.loads(result.stdout)) == 3
        assert "Picture: runs" in result.stderr

    def test_a_folder_with_other_things_is_refused(self):
        Path("here").mkdir()
        Path("here/file").touch()
        assert "--out here has other things" in sentence(joma("verify", "--plot", "--out", "here"))

    def test_the_folder_of_another_run_is_refused(self):
        run = Run.create("fig4", {}, out="f4")
        run.write_table("curve", {"a": [1]})
        assert "--out f4 holds a fig4 run" in sentence(joma("verify", "--out", "f4"))
        assert Run.open("f4").tables == ["curve"]

    def test_a_claim_that_raises_is_one_failed_row(self, monkeypatch, few_claims):
        def broken():
            raise ValueError("shapes do not match")

        raising = dataclasses.replace(few_claims[0], derived=broken)
        monkeypatch.setattr(claims, "CLAIMS", (raising, *few_claims[1:]))
        result = joma("verify")
        assert result.exit_code == 1
        assert "right: ValueError: shapes do not match" in result.stdout
        assert result.stdout.splitlines()[-1].startswith("2 of 3 claims hold as derived")

    def test_ctrl_c_says_what_was_saved(self, monkeypatch, few_claims):
        def interrupted():
            raise KeyboardInterrupt

        last = dataclasses.replace(few_claims[2], derived=interrupted)
        monkeypatch.setattr(claims, "CLAIMS", (*few_claims[:2], last))
        result = joma("verify", "--out", "my runs")
        assert result.exit_code == 130
        assert "Measured 2 of 3 claims." in result.stderr
        assert "Interrupted. Incomplete: my runs." in result.stderr
        assert "joma verify --out 'my runs'" in result.stderr
        assert "✗ 1.0e+00" in result.stdout
        assert "2 of 2 claims hold" in result.stdout
        run = Run.open("my runs")
        assert run.read_json("outcome") == {"status": "interrupted"}
        assert len(run.read_json("verdicts")) == 2
        assert "Nothing was saved" in joma("verify").stderr
        assert len(json.loads(joma("verify", "--json").stdout)) == 2
