"""Payloads and pages: what they hold, how long series are thinned, that nothing gets out."""

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from joma.errors import JomaError
from joma.report.html import damaged_payload, index_page, is_report, page, payload
from joma.runs import Run, list_runs
from tests.report._runs import HOSTILE, finding, made_run


@settings(deadline=None, max_examples=20)
@given(arrays(np.float64, st.integers(1, 400), elements=st.floats(width=32)), st.integers(8, 90))
def test_thinning_keeps_extremes_and_ends(values, most):
    with TemporaryDirectory() as folder:
        run = Run.create("monitor", {}, out=Path(folder) / "run")
        run.metrics.append_many(np.arange(values.size), "loss", values[:, None])
        run.metrics.flush()
        (chart,) = payload(run, most_points=most)["charts"]
    (drawn,) = chart["series"]
    assert len(drawn["steps"]) <= max(most, 1)
    assert (drawn["total"], drawn["thinned"]) == (values.size, values.size > len(drawn["steps"]))
    assert {0, values.size - 1} <= set(drawn["steps"])
    assert sorted(set(drawn["steps"])) == drawn["steps"]
    finite = values[np.isfinite(values)]
    if finite.size:
        shown = [value for value in drawn["values"] if value is not None]
        np.testing.assert_allclose([min(shown), max(shown)], [finite.min(), finite.max()], 1e-5)
    if finite.size < values.size:
        assert drawn["marks"]


class TestPayload:
    def test_charts_by_section_with_whole_keys(self, tmp_path):
        record = payload(made_run(tmp_path / "run", findings=[finding()]))
        keys = [chart["key"] for chart in record["charts"]]
        assert keys == ["loss", "attention_entropy", "stable_rank", "gradient_energy_8"]
        assert {it["metric"] for it in record["charts"][0]["series"]} == {"loss", "validation_loss"}
        one = record["charts"][1]["series"][1]
        assert (one["layer"], one["head"], one["member"], one["kind"]) == (0, 0, 0, "self")
        assert one["module"] == "encoder.layers.0.self_attn"
        assert one["role"] == "encoder.layers.*.self_attn"
        assert record["charts"][2]["series"][0]["bound"] == [0.01] * 12
        assert record["state"] == "ended"
        assert record["findings"][0]["chart"] == "attention_entropy"
        assert record["summary"]["last_step"] == 60
        assert [fact["metric"] for fact in record["facts"]] == ["vocabulary"]

    def test_budget_of_all_series(self, tmp_path):
        run = made_run(tmp_path / "run", steps=3000, layers=4)
        record = payload(run, budget=2000)
        points = sum(len(it["values"]) for chart in record["charts"] for it in chart["series"])
        assert points <= 2000

    def test_what_is_not_finite_survives_json(self, tmp_path):
        run = Run.create("monitor", {}, out=tmp_path / "run")
        for step, value in enumerate([1.0, np.nan, np.inf, -np.inf, 2.0]):
            run.metrics.append(step, "loss", value)
        run.metrics.flush()
        record = json.loads(json.dumps(payload(run), allow_nan=False))
        loss = record["charts"][0]["series"][0]
        assert loss["values"] == [1.0, None, None, None, 2.0]
        assert loss["marks"] == {"nan": [1], "inf": [2], "-inf": [3]}
        assert record["summary"]["loss"]["lowest"] == 1.0

    def test_a_run_without_numbers(self, tmp_path):
        run = Run.create("fig2", {"seed": 1}, out=tmp_path / "run")
        run.write_table("curve", {"x": [1.0, np.nan], "word": ["a", "b"]})
        record = payload(run)
        assert record["charts"] == []
        assert record["tables"][0]["rows"] == [[1.0, "a"], ["NaN", "b"]]
        assert "curve" in page([record])

    def test_members_and_unknown_metrics(self, tmp_path):
        run = Run.create("any", {}, out=tmp_path / "run")
        run.metrics.append_many([1, 2], "my_number", [[1.0, 2.0], [3.0, 4.0]])
        run.metrics.flush()
        (chart,) = payload(run)["charts"]
        assert chart["title"] == "My number"
        assert [it["member"] for it in chart["series"]] == [0, 1]

    def test_findings_of_any_form(self, tmp_path):
        odd = [{"kind": 3, "step": "x", "layer": True, "evidence": [1], "severity": "bad"}, {}]
        run = made_run(tmp_path / "run", findings=odd)
        for found in payload(run)["findings"]:
            assert found["severity"] == "note"
            assert found["step"] is None
            assert found["chart"] == "loss"

    def test_memory_of_galore(self, tmp_path):
        galore = payload(made_run(tmp_path / "run", layers=1))["galore"]
        # Two weights of 64 × 256: 2mn numbers each; rank 8 keeps r(2·256 + 64).
        assert galore["adamw_bytes"] == 2 * 4 * 2 * 64 * 256
        assert galore["ranks"][0]["galore_bytes"] == 2 * 4 * 8 * (2 * 256 + 64)

    def test_gradients_that_are_not_finite(self, tmp_path):
        run = Run.create("monitor", {}, out=tmp_path / "run")
        for step, energy in enumerate((0.25, 0.5, float("nan"))):
            for name, value in (("gradient_energy_8", energy), ("gradient_stable_rank", energy)):
                run.metrics.append(step, name, value, module="layers.0.linear1", layer=0)
            run.metrics.append(step, "gradient_energy_8", float("inf"), module="lost", layer=1)
        run.metrics.flush()
        record = payload(run)
        assert record["galore"]["weights"] == [
            {
                "module": "layers.0.linear1",
                "layer": 0,
                "energy": {8: 0.5},
                "step": 1,
                "stable_rank": 0.5,
            }
        ]
        assert not record["galore"]["finite"]
        assert record["galore"]["ranks"][0]["least"] == 0.5
        page([record])

    def test_evidence_that_is_not_finite(self, tmp_path):
        evidence = {"loss": float("nan"), "huge": 10**400, "limit": 2.0}
        run = made_run(tmp_path / "run")
        (run.path / "findings.json").write_text(json.dumps({"findings": [{"evidence": evidence}]}))
        (run.path / "manifest.json").unlink()
        record = payload(run)
        assert set(record["findings"][0]["evidence"]) == {"huge", "limit"}
        page([record])

    def test_a_damaged_run_is_refused_in_a_sentence(self, tmp_path):
        run = made_run(tmp_path / "run")
        part = next((run.path / "metrics").iterdir())
        part.write_bytes(part.read_bytes()[:200])
        with pytest.raises(JomaError, match="damaged"):
            payload(Run.open(run.path))


class _Elements(HTMLParser):
    """Collects the elements of a page, with the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {"script": [], "style": []}
        self._inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._inside = tag if tag in self.text else None

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside:
            self.text[self._inside].append(data)


class TestPage:
    def test_is_complete_in_itself(self, tmp_path):
        html = page([payload(made_run(tmp_path / "run"))])
        elements = _Elements(html)
        for tag, attributes in elements.found:
            assert "src" not in attributes, tag
            assert tag not in ("iframe", "object", "embed", "base", "form")
            if tag == "link":
                assert attributes["href"] == "data:,"
        assert "@import" not in html
        policy = _policy(elements)
        assert "default-src 'none'" in policy
        assert "connect-src" not in policy
        assert "unsafe" not in policy
        for kind in ("script", "style"):
            digest = hashlib.sha256(elements.text[kind][-1].encode()).digest()
            assert f"{kind}-src 'sha256-{base64.b64encode(digest).decode()}'" in policy

    def test_a_live_page_may_ask_its_own_server_alone(self, tmp_path):
        html = page([payload(made_run(tmp_path / "run"))], live=True, api="../api", home="../")
        assert "connect-src 'self'" in _policy(_Elements(html))

    def test_hostile_names_do_nothing(self, tmp_path):
        run = made_run(
            tmp_path / "run",
            module=HOSTILE,
            findings=[finding(sentence=HOSTILE, kind=HOSTILE, module=HOSTILE, advice=HOSTILE)],
            config={HOSTILE: {"inner": HOSTILE}, "list": [HOSTILE]},
        )
        run.metrics.append(1, HOSTILE, 1.0)
        run.metrics.flush()
        broken = damaged_payload(Path(HOSTILE.replace("/", "")), HOSTILE)
        html = page([payload(run), broken], title=HOSTILE, home=f'"{HOSTILE}')
        elements = _Elements(html)
        assert [tag for tag, _ in elements.found].count("script") == 2
        assert "img" not in [tag for tag, _ in elements.found]
        assert not any(name.startswith("on") for _, attrs in elements.found for name in attrs)
        data = json.loads(elements.text["script"][0])
        assert data["runs"][0]["findings"][0]["sentence"] == HOSTILE

    def test_half_characters_can_be_written(self, tmp_path):
        record = payload(made_run(tmp_path / "run"))
        record["title"] = record["findings"] = "\ud800"
        record["findings"] = [finding(sentence="\ud800", chart="loss")]
        page([record]).encode()

    def test_shared_steps_are_written_once(self, tmp_path):
        html = page([payload(made_run(tmp_path / "run"))])
        data = json.loads(_Elements(html).text["script"][0])
        assert len(data["runs"][0]["grids"]) == 3

    def test_a_run_of_20_000_rows_fits_a_megabyte(self, tmp_path):
        run = made_run(tmp_path / "run", steps=6000, layers=2, heads=1)
        record = payload(run)
        assert record["summary"]["rows"] > 20_000
        assert len(page([record]).encode()) <= 1e6

    def test_crowded_runs_leave_out_single_heads(self, tmp_path):
        run = made_run(tmp_path / "run", layers=4, heads=12)
        record = payload(run, budget=500)
        entropy = next(it for it in record["charts"] if it["key"] == "attention_entropy")
        assert entropy["left_out"] == 48
        assert all(it["head"] is None for it in entropy["series"])

    def test_index(self, tmp_path):
        made_run(tmp_path / "runs" / "one", findings=[finding()])
        bad = made_run(tmp_path / "runs" / "bad")
        (bad.path / "config.json").write_text(f'"{HOSTILE[:9]}"')
        elements = _Elements(index_page(list_runs(tmp_path / "runs")))
        data = json.loads(elements.text["script"][0])
        runs = {it["id"]: it for it in data["runs"]}
        states = {name: it["state"] for name, it in runs.items()}
        assert states == {"one": "ended", "bad": "damaged"}
        assert runs["one"]["worst"]["severity"] == "warning"
        assert runs["bad"]["worst"] is None

    def test_the_list_tells_runs_apart_and_says_nan(self, tmp_path):
        for name in ("small", "large"):
            run = made_run(tmp_path / name / "monitor")
            run.metrics.append(100, "loss", np.nan)
            run.metrics.flush()
        data = json.loads(_Elements(index_page(list_runs(tmp_path))).text["script"][0])
        assert {it["title"] for it in data["runs"]} == {"small/monitor", "large/monitor"}
        assert {it["last_loss_text"] for it in data["runs"]} == {"NaN"}
        assert payload(run)["title"] == "large/monitor"

    def test_is_report(self, tmp_path):
        report, other = tmp_path / "a.html", tmp_path / "b.html"
        report.write_text(page([payload(made_run(tmp_path / "run"))]))
        other.write_text("<!doctype html><title>mine</title>")
        assert is_report(report)
        assert not is_report(other)


def _policy(elements: _Elements) -> str:
    found = [it for tag, it in elements.found if tag == "meta" and "http-equiv" in it]
    assert len(found) == 1
    return str(found[0]["content"])


def test_pages_need_neither_matplotlib_nor_torch():
    code = (
        "import sys, joma.report.html, joma.report.laboratory; "
        "print(sorted({'matplotlib', 'torch', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_scripts_have_no_way_to_turn_text_into_markup():
    assets = Path(payload.__code__.co_filename).with_name("assets")
    for file in [*(assets / "js").glob("*.js"), assets / "index.js"]:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
