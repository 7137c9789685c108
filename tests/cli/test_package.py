"""What `import joma` offers."""

import importlib.metadata
from pathlib import Path

import pytest

import joma


def test_rooms_are_there_when_asked_for():
    assert joma.theory.__name__ == "joma.theory"
    assert joma.runs.Run.__name__ == "Run"
    assert {"theory", "runs", "report", "experiments", "citation", "__version__"} <= set(dir(joma))
    with pytest.raises(AttributeError, match="no attribute 'bogus'"):
        _ = joma.bogus  # type: ignore[attr-defined]


def test_version_without_installation(monkeypatch):
    def missing(_: str):
        raise importlib.metadata.PackageNotFoundError

    assert joma.__version__
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert joma.__version__ == "0+source"


def test_citation_names_the_papers_and_is_balanced():
    text = joma.citation()
    papers = ("2310.00535", "2305.16380", "2403.03507", "2306.14048", "2309.17453", "2310.17157")
    for number in papers:
        assert number in text
    assert text.count("{") == text.count("}")
    assert text.count("@") == len(papers) + 1
    assert joma.__version__ in text


def test_types_are_shipped():
    assert (Path(joma.__file__).parent / "py.typed").is_file()
