"""`joma reproduce fig6 --corpus`: what it says of the text, and that it is trained on."""

import json
import re
from pathlib import Path

import pytest

from joma.experiments import language
from joma.runs import Run
from tests.cli._command import joma, sentence
from tests.experiments._language import SIZE


@pytest.fixture(autouse=True)
def texts(monkeypatch, tmp_path) -> Path:
    """A folder with a short text, where we are, and nothing else anywhere."""
    monkeypatch.setitem(language.SIZES, "tiny", SIZE)
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JOMA_SHARED", raising=False)
    folder = Path("my texts")
    folder.mkdir()
    for split in ("train", "valid"):
        (folder / f"{split}.txt").write_text("one word and another and one more word\n" * 30)
    return folder


TINY = ("reproduce", "fig6", "--scale", "tiny", "--device", "cpu")
ONE = (*TINY, "--group", "depth-1")


def test_the_plan_names_the_text_and_needs_none():
    for scale, corpus in (("small", "embedded"), ("full", "wikitext-2")):
        result = joma("reproduce", "fig6", "--scale", scale, "--dry-run")
        assert f"  options: corpus {corpus}\n" in result.stdout
    result = joma("reproduce", "fig6", "--corpus", "wikitext-103", "--dry-run")
    assert result.exit_code == 0
    assert "  options: corpus wikitext-103\n" in result.stdout
    assert not Path("runs").exists()


def test_the_plan_takes_as_long_as_the_text():
    asked = ("reproduce", "fig6", "--scale", "full", "--corpus", "wikitext-103", "--dry-run")
    (plan,) = json.loads(joma(*asked, "--json").stdout)
    assert plan["scales"]["full"]["about_seconds"] > 10 * 570
    (usual,) = json.loads(joma(*asked[:4], "--dry-run", "--json").stdout)
    assert usual["scales"]["full"]["about_seconds"] < 1000


def test_a_folder_is_trained_on_and_gone_on_with(texts):
    result = joma(*ONE, "--corpus", str(texts), "--out", "here", "--json")
    assert result.exit_code == 0, result.stderr
    assert "incomplete" in result.stdout  # the other depths are missing
    (record,) = json.loads(result.stdout)
    assert record["options"] == {"corpus": str(texts.resolve())}
    assert "published" not in record["table"][0]
    assert Run.open("here").config["options"] == record["options"]
    group = Run.open("here/groups/depth-1")
    assert group.config["words"] == 6  # with <unk>
    before = [path.stat().st_mtime_ns for path in (group.path / "metrics").iterdir()]
    assert joma(*ONE, "--corpus", f"./{texts}/", "--out", "here").exit_code == 0
    assert [path.stat().st_mtime_ns for path in (group.path / "metrics").iterdir()] == before


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_a_run_of_another_text_is_refused(texts, dry_run: list[str]):
    joma(*ONE, "--corpus", str(texts), "--out", "here")
    for corpus, named in (("embedded", "embedded"), (None, "embedded"), ("wikitext-2",) * 2):
        flags = [] if corpus is None else ["--corpus", corpus]
        line = sentence(joma(*ONE, *flags, *dry_run, "--out", "here"))
        assert line.startswith("joma: --out here holds a fig6 run with other settings (options.cor")
        assert f"{texts.resolve()}, not {named}" in line


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fig6 --corpus wikitext-3", "--corpus must be wikitext-2, wikitext-103, embedded, hub:NA"),
        ("fig6 --corpus runs", "got 'runs', which is none of them"),
        ("fig6 --corpus cache", "got 'cache', which has no train.txt and no valid.txt"),
        ("fig8 --corpus embedded", "--corpus must not be given for fig8, which has no options"),
        ("fig6 fig8 --corpus embedded", "--corpus must not be given for fig8"),
        ("fig2 --corpus embedded", "--corpus must not be given for fig2, which has no options"),
        ("table1 --corpus embedded", "for table1, which has learning-rate, hidden, got 'embedded'"),
        ("fig6 --corpus wikitext-103", "text wikitext-103 needs the environment variable JOMA_SH"),
        ("fig6 --corpus hub:", "corpus must be 'hub:NAME' or 'hub:NAME:CONFIG'"),
        ("fig6 --scale full", "text wikitext-2 needs the environment variable JOMA_SHARED"),
    ],
)
def test_bad_texts_get_one_sentence_before_anything_runs(line: str, expected: str):
    Path("cache").mkdir()
    assert expected in sentence(joma("reproduce", *line.split(), "--out", "here"))
    assert not Path("here").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "text must not be empty"),
        (b"\xff\xfe", "text must be UTF-8"),
        (b"a b c\n", "train of text .* is too short: streams must have at least 2 words each"),
    ],
)
def test_texts_of_ones_own_that_are_no_good_leave_no_folder(texts, content: bytes, expected: str):
    (texts / "train.txt").write_bytes(content)
    assert re.search(expected, sentence(joma(*ONE, "--corpus", str(texts), "--out", "here")))
    assert not Path("here").exists()
