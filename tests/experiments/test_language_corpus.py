"""Fig. 6 with another text than its scale's: what is trained and compared, its time."""

import dataclasses
import os
import random
from pathlib import Path

import pytest

from joma.data.corpora import NAMED
from joma.experiments import Verdict, language
from joma.experiments.language import (
    FIG6,
    SIZES,
    WIKITEXT_2,
    WIKITEXT_103,
    LanguageSetting,
    results,
    sized,
    training,
)
from joma.runs import Run
from tests.experiments._language import FULL, SIZE, curves, depths, write_reference

SHARED = Path(os.environ.get("JOMA_SHARED", Path(__file__).parents[3] / "shared"))
LARGE = LanguageSetting(sized("full", "wikitext-103"), words=226_000, stream=5_100_000, digests={})


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def texts(tmp_path) -> Path:
    """A folder with two short texts."""
    draw = random.Random(0)
    folder = tmp_path / "texts"
    folder.mkdir()
    for split in ("train", "valid"):
        lines = (" ".join(draw.choices("abcdefghij", k=20)) for _ in range(12))
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


def asked(corpus: str | Path, scale: str = "tiny", **more):
    return FIG6.request(scale=scale, options={"corpus": str(corpus)}, **more)


class TestSize:
    def test_another_text_is_trained_on_at_one_learning_rate(self):
        size = results.size_of(asked("wikitext-103", "full"))
        assert size == dataclasses.replace(
            SIZES["full"], corpus="wikitext-103", learning_rates=(1e-4,), last=200_000
        )
        assert size.networks == 12
        assert sized("small", "wikitext-103").last == SIZES["small"].last

    def test_what_was_published_is_of_the_full_size_of_its_text(self, texts):
        assert FULL.published is WIKITEXT_2
        assert LARGE.published is WIKITEXT_103
        for size in (SIZES["small"], sized("small", "wikitext-2"), sized("full", str(texts))):
            assert dataclasses.replace(FULL, size=size).published is None


class TestVerdict:
    def test_wikitext_103_is_compared_with_its_own_numbers(self):
        outcome = results.judge_depths(depths(WIKITEXT_103), LARGE)
        assert outcome.agrees, outcome.finding
        assert outcome.finding.startswith("on WikiText-103 best validation loss 5.047, 4.912, ")
        assert [row["published"] for row in outcome.table] == [5.047, 4.912, 4.762, 4.679]
        assert not results.judge_depths(depths(WIKITEXT_2), LARGE).agrees

    @pytest.mark.parametrize("scale", ["tiny", "full"])
    def test_of_another_text_nothing_was_published(self, texts, scale: str):
        own = dataclasses.replace(FULL, size=sized(scale, str(texts)))
        rate = own.size.learning_rate
        shown = {(depth, rate): curves(depth, rate) for depth in language.DEPTHS}
        outcome = results.judge_depths(shown, own)
        assert outcome.verdict is Verdict.NOT_COMPARABLE
        assert outcome.finding.startswith("nothing was published of this text (")
        assert f" steps on {texts}, " in outcome.finding
        assert "published" not in outcome.table[0]


class TestTexts:
    def test_a_folder_at_the_tiny_scale(self, texts, tmp_path, monkeypatch):
        monkeypatch.setitem(language.SIZES, "tiny", SIZE)
        run = Run.create("fig6", {}, out=tmp_path / "fig6")
        recorded = write_reference(tmp_path / "r", depths())
        outcome = FIG6.reproduce(run, asked(texts, reference=recorded))
        assert outcome.verdict is Verdict.NOT_COMPARABLE, outcome.finding
        assert "nothing was published of this text (4 steps on " in outcome.finding
        assert "11 different words" in outcome.finding
        assert outcome.paragraphs[-1].startswith("The recorded curves are those of WikiText-2 at ")
        assert "comparison" not in run.tables
        group = Run.open(run.path / "groups" / "depth-5")
        assert group.config["size"]["corpus"] == str(texts)
        assert [member["cell"] for member in group.config["members"]] == ["lr 1e-2"] * 2

    def test_a_text_too_short_for_a_window_is_refused(self, texts, tmp_path):
        (texts / "train.txt").write_text("too short to learn from\n" * 4)
        with pytest.raises(ValueError, match="the training text is too short"):
            training.load(sized("tiny", str(texts)))

    @pytest.mark.parametrize("name", ["wikitext-2", "wikitext-103"])
    def test_a_missing_text_is_reported_with_the_places_searched(self, tmp_path, monkeypatch, name):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("JOMA_SHARED", str(tmp_path / "shared"))
        places = rf"JOMA_SHARED .*/shared'.*data/{name} .*cache/corpora/{name}; or .*{NAMED[name]}"
        with pytest.raises(ValueError, match=rf"^text {name} needs .*{places}"):
            FIG6.check_needs(asked(name))
        folder = tmp_path / "shared" / "data" / name
        folder.mkdir(parents=True)
        (folder / "valid.txt").write_text("a b c\n")
        with pytest.raises(ValueError, match=rf"^text .*data/{name} has no train.txt in it"):
            FIG6.check_needs(asked(name))
        (folder / "train.txt").write_text("a b c\n")
        FIG6.check_needs(asked(name))


class TestTakes:
    @pytest.mark.parametrize("corpus", ["wikitext-103", NAMED["wikitext-103"]])
    def test_wikitext_103_takes_hours(self, corpus: str):
        takes = FIG6.takes(asked(corpus, "full"))
        # 200 of 58 thousand steps, 226,000 of 28,782 words, 12 of 30 networks; 100 s to read it.
        expected = 570 * (200 / 58) * (226_000 / 28_782) * (12 / 30) + 102
        assert takes["full"].seconds == pytest.approx(expected, rel=1e-3)
        assert takes["full"].device == "one H200, estimated and not measured"
        assert takes["small"].seconds > 102


def test_groups_of_two_texts_make_no_figure(tmp_path, texts) -> None:
    run = Run.create("fig6", {}, out=tmp_path / "fig6")
    FIG6.reproduce(run, asked(texts, groups=["depth-1"]))
    with open(texts / "train.txt", "a") as file:
        file.write("a b c\n")
    with pytest.raises(ValueError, match="depth-1 was trained on another text"):
        FIG6.reproduce(run, asked(texts, groups=["depth-2"]))
    assert not (run.path / "groups" / "depth-2").exists()
