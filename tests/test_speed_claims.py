"""Statements of speed: each is stated where it says so, and the page shows the last results.

No test here depends on a time.
"""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from benchmarks import speed
from benchmarks.speed_claims import CLAIMS, SpeedClaim

ROOT = Path(__file__).parent.parent


def plain(text: str) -> str:
    """Return a text without line breaks, so that words are found across them."""
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda it: it.name)
def test_claims_stand_where_they_say(claim: SpeedClaim):
    assert claim.stated
    for file, words in claim.stated.items():
        assert plain(words) in plain((ROOT / file).read_text(encoding="utf-8")), file


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda it: it.name)
def test_commands_are_benchmarks_that_print_json(claim: SpeedClaim):
    assert claim.command[0] == "-m"
    found = importlib.util.find_spec(claim.command[1])
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).read_text(encoding="utf-8")
    options = [it for it in claim.command if it.startswith("--")]
    assert "--json" in options
    assert not [it for it in options if f'"{it}"' not in source]


def test_names_are_unique():
    assert len({it.name for it in CLAIMS}) == len(CLAIMS)


def test_the_page_is_what_the_record_gives():
    record = speed.read_record()
    assert record.keys() <= {it.name for it in CLAIMS}
    assert speed.PAGE.read_text(encoding="utf-8") == speed.page(record)


def example(limit: float, *, at_least: bool = False) -> SpeedClaim:
    return SpeedClaim(
        "example", "It is fast", {"README.md": "joma"}, "cpu", ("-c", "print(1)"), float, limit,
        at_least=at_least,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("at_least", "value", "met"),
    [(False, 1.4, True), (False, 1.6, False), (True, 1.6, True), (True, 1.4, False)],
)
def test_a_missed_mark_is_shown(at_least: bool, value: float, met: bool, monkeypatch):
    claim = example(1.5, at_least=at_least)
    assert claim.is_met(value) is met
    assert not claim.is_met(float("nan"))
    monkeypatch.setattr(speed, "CLAIMS", (claim,))
    text = speed.page({"example": {"value": value, "date": "d", "machine": "m", "command": "c"}})
    assert ("missed" in text) is not met
    assert "not measured" in speed.page({})


def test_the_command_measures_writes_and_shows(tmp_path, monkeypatch, capsys):
    script = "import json; print(json.dumps({'ratio': 1.25}))"
    claims = [
        SpeedClaim(name, "It is fast", {}, "cpu", ("-c", script), lambda it: it["ratio"], limit)
        for name, limit in (("one", 1.5), ("other", 1.0))
    ]
    broken = SpeedClaim("broken", "It fails", {}, "cpu", ("-c", "1/0"), float, 1)
    monkeypatch.setattr(speed, "CLAIMS", (*claims, broken))
    monkeypatch.setattr(speed, "RECORD", tmp_path / "results.json")
    monkeypatch.setattr(speed, "PAGE", tmp_path / "RESULTS.md")
    ran = []
    run = speed.measured
    monkeypatch.setattr(speed, "measured", lambda it: ran.append(it) or run(it))
    monkeypatch.setattr("sys.argv", ["speed", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        speed.main()
    assert ended.value.code == 1
    assert len(ran) == 2, "claims that share a command run it once"
    said = capsys.readouterr()
    assert "one: 1.25× (mark ≤ 1.5×)\n" in said.out
    assert "other: 1.25× (mark ≤ 1×)  MISSED" in said.out
    assert "ZeroDivisionError" in said.err
    record = json.loads((tmp_path / "results.json").read_text())
    assert record.keys() == {"one", "other"}
    assert (tmp_path / "RESULTS.md").read_text() == speed.page(record)


def test_a_missing_model_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("JOMA_MODELS", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="JOMA_MODELS"):
        speed._with_model("MODEL:none.gguf")
