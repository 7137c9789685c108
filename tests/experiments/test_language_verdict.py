"""Fig. 6 and 8: verdicts that can turn, recorded curves, and what is drawn."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from joma.experiments import Verdict
from joma.experiments.language import DEPTHS, RATES, results
from joma.experiments.language import curves as recordings
from joma.experiments.language.curves import EntropyCurves
from tests.experiments._language import FULL, curves, depths, rates, write_reference

SHARED = Path(os.environ.get("JOMA_SHARED", Path(__file__).parents[3] / "shared"))


class TestVerdict:
    def test_depths(self):
        outcome = results.judge_depths(depths(), FULL)
        assert outcome.agrees
        assert "5.357, 5.255, 5.169, 5.110 at 1, 2, 5 and 10 layers" in outcome.finding
        assert "with 1 layer in layer 0 (3/3)" in outcome.finding
        assert [row["published"] for row in outcome.table] == [5.357, 5.255, 5.169, 5.110]

    @pytest.mark.parametrize(
        "changed",
        [
            {"d5": curves(5, loss=5.20)},
            {"d10": curves(10, loss=5.07)},
            {"d2": curves(2, loss=5.255, low=2.2, end=2.2)},
        ],
    )
    def test_depths_that_differ(self, changed):
        assert not results.judge_depths(depths(**changed), FULL).agrees

    @pytest.mark.parametrize("judge", [results.judge_depths, results.judge_rates])
    def test_spoiled_arithmetic_is_said(self, judge):
        every = {**depths(), **rates()}
        odd = dataclasses.replace(every[5, 1e-4], share_apart=0.0115)
        outcome = judge({**every, (5, 1e-4): odd}, FULL)
        assert not outcome.agrees
        assert "with 5 layers at learning rate 1e-4 the training loss of one" in outcome.finding
        assert "at 1.1% of the updates" in outcome.finding or "at 1.2% of" in outcome.finding
        rare = dataclasses.replace(odd, share_apart=0.0009)
        assert judge({**every, (5, 1e-4): rare}, FULL).agrees

    def test_what_is_missing_is_named(self):
        some = {key: own for key, own in depths().items() if key[0] < 5}
        outcome = results.judge_depths(some, FULL)
        assert outcome.verdict is Verdict.INCOMPLETE
        assert "depth-5, depth-10" in outcome.finding
        assert len(outcome.table) == 2
        assert results.judge_rates({}, FULL).verdict is Verdict.INCOMPLETE

    def test_rates(self):
        outcome = results.judge_rates(rates(), FULL)
        assert outcome.agrees, outcome.finding
        assert "collapses in every network at 1e-3 and 1e-2" in outcome.finding

    @pytest.mark.parametrize(
        "changed",
        [
            curves(5, 1e-6, loss=6.47),
            curves(5, 1e-2, loss=6.9, low=0.1, end=0.05),
            curves(5, 1e-4, loss=5.3),
            curves(5, 1e-3, loss=5.305),  # does not collapse
            curves(5, 1e-5, loss=5.671, low=0.1, end=0.05),  # does
        ],
    )
    def test_rates_that_differ(self, changed: EntropyCurves):
        assert not results.judge_rates(rates(changed=changed), FULL).agrees

    @pytest.mark.parametrize("judge", [results.judge_depths, results.judge_rates])
    def test_a_smaller_size_is_not_comparable(self, judge):
        every = {**depths(), **rates()}
        narrow = dataclasses.replace(FULL, size=dataclasses.replace(FULL.size, width=100))
        outcome = judge(every, narrow)
        assert outcome.verdict is Verdict.NOT_COMPARABLE
        assert "; the validation loss goes 10.00" in outcome.finding
        stuck = dataclasses.replace(every[5, 1e-4], loss=np.full((59, 3), 8.0))
        still = judge({**every, (5, 1e-4): stuck}, narrow)
        assert still.verdict is Verdict.NOT_COMPARABLE
        assert "does not fall in every network" in still.finding


class TestReference:
    def test_what_was_written_is_read(self, tmp_path):
        expected = {(2, 1e-4): curves(2), (5, 1e-3): curves(5, 1e-3)}
        found = recordings.read_recorded(write_reference(tmp_path / "r", expected))
        assert found.keys() == expected.keys()
        for key, own in expected.items():
            assert found[key].steps == own.steps
            np.testing.assert_array_equal(found[key].entropy, own.entropy)
            np.testing.assert_array_equal(found[key].loss, own.loss)

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            (lambda text: "", "must begin with layers,lr,seed,step,layer,att.*got nothing"),
            (lambda text: text.replace("seed", "sead", 1), "must begin with .* got layers,lr,sead"),
            (lambda text: text + "2,0.0001,0,0,0\n", "got '2,0.0001,0,0,0' in line"),
            (lambda text: text + "2,0.0001,0,x,0,1.0\n", "got '2,0.0001,0,x,0,1.0' in line"),
            (lambda text: text + "2,0.0001,9,0,0,nan\n", "must have finite numbers"),
            (
                lambda text: text + "2,0.0001,9,0,0,1.0\n",
                "must have every layer, step and seed .* missing of 2",
            ),
        ],
    )
    def test_a_damaged_record_gets_one_sentence(self, tmp_path, change, sentence: str):
        folder = write_reference(tmp_path / "r", {(2, 1e-4): curves(2)})
        file = folder / recordings.ENTROPY_FILE
        file.write_text(change(file.read_text()))
        with pytest.raises(ValueError, match=f"^reference .*{sentence}"):
            recordings.read_recorded(folder)

    def test_missing_or_no_text(self, tmp_path):
        with pytest.raises(ValueError, match=r"entropy\.csv cannot be read: No such file"):
            recordings.read_recorded(tmp_path)
        (tmp_path / recordings.ENTROPY_FILE).write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ValueError, match="must be a text of comma-separated values"):
            recordings.read_recorded(tmp_path)

    def test_a_comparison_by_hand(self):
        recorded, ours = curves(1), curves(1, low=1.4, end=2.25)
        (pair,) = recordings.compare({(1, 1e-4): ours}, {(1, 1e-4): recorded})
        one, two = ours.entropy[0].mean(-1), recorded.entropy[0].mean(-1)
        assert pair.pearson == pytest.approx(np.corrcoef(one, two)[0, 1])
        assert pair.left_out == pytest.approx(1)
        off = np.abs(one - two) <= recordings.BAND + 0.01  # the seeds are .01 apart
        assert pair.inside == pytest.approx(off.mean())
        assert (pair.lowest, pair.recorded_lowest) == pytest.approx((1.41, 1.51))
        assert (pair.end, pair.recorded_end) == pytest.approx((2.26, 2.21))
        assert pair.begins == 0
        assert (pair.depth, pair.layer, pair.measurements) == (1, 0, 59)

    def test_checks_of_depths_can_turn(self):
        recorded = depths()
        checks = results.check_depths(recordings.compare(recorded, recorded))
        assert [check.holds for check in checks] == [True] * 5
        far = depths(d5=curves(5, low=2.4, end=1.2), d10=curves(10, low=2.4, end=1.2, start=2.6))
        checks = results.check_depths(recordings.compare(far, recorded))
        assert [check.holds for check in checks] == [False] * 5

    def test_checks_of_rates_can_turn(self):
        recorded = rates()
        pairs = recordings.compare(recorded, recorded)
        assert all(check.holds for check in results.check_rates(pairs, recorded, recorded))
        far = {key: curves(5, key[1], 8.0, 0.1, 0.05, start=2.6) for key in recorded}
        checks = results.check_rates(recordings.compare(far, recorded), far, recorded)
        assert not any(check.holds for check in checks)

    def test_the_recorded_runs_are_as_alike_as_known(self):
        if not (SHARED / "reference" / recordings.ENTROPY_FILE).is_file():
            pytest.skip("JOMA_SHARED names no folder with reference/wikitext2_entropy.csv")
        recorded = recordings.read_recorded(SHARED / "reference")
        assert sum(own.seeds for own in recorded.values()) == 141
        shown = {(depth, 1e-4): recorded[depth, 1e-4] for depth in DEPTHS}
        pairs = recordings.compare(shown, recorded)
        assert len(pairs) == 18
        assert sum(pair.left_out >= 0.95 for pair in pairs) == 6
        five = [pair.left_out for pair in pairs if pair.depth == 5]
        assert five == pytest.approx([0.96, 0.93, 0.95, 0.75, 0.89], abs=0.0051)
        lowest = {(p.depth, p.layer): (p.lowest, p.end) for p in pairs}
        assert lowest[1, 0] == pytest.approx((1.554, 2.213), abs=1e-3)
        assert lowest[10, 9] == pytest.approx((2.269, 2.503), abs=1e-3)
        for rate, loss in results.RECORDED_LOSS.items():
            assert recorded[5, rate].best.mean() == pytest.approx(loss, abs=6e-4)
        assert results.judge_depths(shown_with_ranks(shown), FULL).agrees
        swept = {(5, rate): recorded[5, rate] for rate in RATES}
        assert results.judge_rates(shown_with_ranks(swept), FULL).agrees


def shown_with_ranks(recorded: dict) -> dict:
    """Recorded curves as if all had been measured of them."""
    return {
        key: dataclasses.replace(own, entropy_mean=own.entropy, stable_rank=own.entropy)
        for key, own in recorded.items()
    }


class TestFigures:
    def test_a_panel_for_each_depth_above_its_ranks(self):
        figure = results.draw_depths(depths(), depths())
        assert figure is not None
        assert len(figure.axes) == 8
        titles = [ax.get_title().splitlines()[0] for ax in figure.axes[:4]]
        assert titles == ["1 layer", "2 layers", "5 layers", "10 layers"]
        # Each layer's mean, the recorded ones, and even attention.
        assert [len(ax.lines) for ax in figure.axes[:4]] == [3, 5, 11, 21]
        assert [len(ax.lines) for ax in figure.axes[4:]] == [1, 2, 5, 10]
        alone = results.draw_depths(depths(), {})
        assert alone is not None
        assert [len(ax.lines) for ax in alone.axes[:4]] == [2, 3, 6, 11]
        assert results.draw_depths({}, {}) is None
