"""Comparing recordings, and the size of a source tree."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools import golden


def _series(name: str, values: list[float], bounds: list[float] | None = None) -> dict[str, Any]:
    leaf: dict[str, Any] = {
        "name": name,
        "steps": list(range(len(values))),
        "values": [value.hex() for value in values],
    }
    return leaf if bounds is None else leaf | {"bounds": [bound.hex() for bound in bounds]}


RANK = "tiny/run/metrics/stable_rank&module=a&layer=0&member=0"
BEFORE: dict[str, Any] = {
    "surface": {
        "command/train": True,
        "option/train --set": {"default": None, "multiple": True},
        "name/joma.models:load": ["path", "keyword device='cpu'"],
        "name/joma.runs:Run": ["path"],
        "name/joma.runs:Run.open": ["path"],
        "claim/lemma8/title": "a title",
    },
    "train": {
        "tiny/json/loss": golden.number(2.5),
        "tiny/run/metrics/loss&member=0": _series("loss", [5.5, 4.25, 3.0]),
        RANK: _series("stable_rank", [3.0, 2.0], [1e-3, 1e-3]),
        "tiny/run/tables/curves/stable_rank": {
            "column": "stable_rank",
            "values": [(3.0).hex(), (2.0).hex()],
        },
        "tiny/run/outcome/finding": "the loss fell to 2.5 in 300 steps",
        "tiny/run/config/precision": "float32",
    },
}


def _changed(part: str, **changes: Any) -> dict[str, Any]:
    """The recording with other values; None takes a key away."""
    after = json.loads(json.dumps(BEFORE))
    for key, value in changes.items():
        after[part].pop(key, None)
        if value is not None:
            after[part][key] = value
    return after


def _compare(
    folder: Path, capsys: pytest.CaptureFixture[str], after: dict[str, Any], renames: str = ""
) -> tuple[int, str]:
    for name, parts in (("before", BEFORE), ("after", after)):
        recording = {"version": golden.VERSION, "parts": parts}
        (folder / f"{name}.json").write_text(json.dumps(recording))
    (folder / "renames.toml").write_text(renames)
    files = [str(folder / name) for name in ("before.json", "after.json", "renames.toml")]
    code = golden.main(["compare", files[0], files[1], "--renames", files[2]])
    return code, capsys.readouterr().out


def test_equal_recordings_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = _compare(tmp_path, capsys, BEFORE)
    assert code == 0
    assert "surface: equal" in out
    assert "train: equal" in out


def test_a_changed_bit_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = "tiny/run/metrics/loss&member=0"
    near = float(np.nextafter(4.25, 5.0))
    code, out = _compare(
        tmp_path, capsys, _changed("train", **{key: _series("loss", [5.5, near, 3.0])})
    )
    assert code == 1
    assert f"{key} at step 1: 4.25 before, {near!r} after, relative difference 2.09e-16" in out


def test_a_missing_step_or_part_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "tiny/run/metrics/loss&member=0"
    code, out = _compare(tmp_path, capsys, _changed("train", **{key: _series("loss", [5.5, 4.25])}))
    assert code == 1
    assert f"{key} at step 2: 3.0 before" in out
    code, out = _compare(tmp_path, capsys, {"surface": BEFORE["surface"]})
    assert code == 1
    assert "train: not recorded after" in out


def test_a_renamed_metric_needs_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = "tiny/run/metrics/loss&member=0", "tiny/run/metrics/train_loss&member=0"
    after = _changed(
        "train", **{old: None, new: _series("loss", [5.5, 4.25, 3.0]) | {"name": "train_loss"}}
    )
    assert _compare(tmp_path, capsys, after)[0] == 1
    code, out = _compare(tmp_path, capsys, after, '[renamed.metrics]\nloss = "train_loss"\n')
    assert code == 0, out
    assert "1 renamed" in out


def test_a_lost_name_is_reported_unless_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = {"name/joma.runs:Run": None, "name/joma.runs:Run.open": None}
    code, out = _compare(tmp_path, capsys, _changed("surface", **lost))
    assert code == 1
    assert "name/joma.runs:Run.open" in out
    reason = '[removed.names]\n"joma.runs:Run" = "nobody used it"\n'
    code, out = _compare(tmp_path, capsys, _changed("surface", **lost), reason)
    assert code == 0
    assert "2 removed" in out
    moved = lost | {"name/joma.folders:Run": ["path"], "name/joma.folders:Run.open": ["path"]}
    table = '[renamed.names]\n"joma.runs:Run" = "joma.folders:Run"\n'
    assert _compare(tmp_path, capsys, _changed("surface", **moved), table)[0] == 0


@pytest.mark.parametrize(
    ("parameters", "code"),
    [
        (["path", "keyword device='cpu'", "keyword dtype=None"], 0),
        (["path='.'", "keyword device='cpu'"], 0),
        (["path", "dtype", "keyword device='cpu'"], 1),
        (["path", "keyword device='cuda'"], 1),
        (["path"], 1),
    ],
)
def test_parameters_may_be_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], parameters: list[str], code: int
) -> None:
    after = _changed("surface", **{"name/joma.models:load": parameters})
    assert _compare(tmp_path, capsys, after)[0] == code


@pytest.mark.parametrize(("moved", "code"), [(1.5e-3, 0), (2.5e-3, 1)])
def test_a_stable_rank_may_move_within_the_bounds_of_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], moved: float, code: int
) -> None:
    after = _changed(
        "train",
        **{
            RANK: _series("stable_rank", [3.0, 2.0 + moved], [1e-3, 1e-3]),
            "tiny/run/tables/curves/stable_rank": {
                "column": "stable_rank",
                "values": [(3.0).hex(), (2.0 + moved).hex()],
            },
        },
    )
    assert _compare(tmp_path, capsys, after)[0] == 1  # not listed
    found, out = _compare(tmp_path, capsys, after, '[bounded]\nstable_rank = "new algorithm"\n')
    assert found == code
    assert ("2 bounded" in out) == (code == 0)


def test_sentences_may_change_their_words_but_not_their_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "tiny/run/outcome/finding"
    code, out = _compare(
        tmp_path, capsys, _changed("train", **{key: "loss 2.5 after 300 steps of training"})
    )
    assert code == 0
    assert "1 reworded" in out
    assert _compare(tmp_path, capsys, _changed("train", **{key: "loss 2.4 after 300 steps"}))[0]
    precision = _changed("train", **{"tiny/run/config/precision": "bfloat16"})
    assert _compare(tmp_path, capsys, precision)[0] == 1


def test_values_are_kept_exactly() -> None:
    values: golden.Values = {}
    golden.flatten(
        {
            "third": 1 / 3,
            "seconds": 1.5,
            "measured": [{"metric": "rank", "layer": 1, "value": 0.1, "bound": 1e-9}],
            "few": np.array([1.0, -0.0]),
            "many": np.arange(500.0),
        },
        "",
        values,
    )
    assert float.fromhex(values["third"]["float"]) == 1 / 3
    assert "seconds" not in values
    assert values["measured/metric=rank&layer=1/value"]["bound"] == (1e-9).hex()
    assert values["few"]["values"] == ["0x1.0000000000000p+0", "-0x0.0p+0"]
    assert set(values["many"]) == {"array", "dtype", "sha256", "first", "last"}


def test_size_of_a_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "__init__.py": '"""The package."""\n',
        "high/__init__.py": "",
        "high/first.py": "from pkg.low import Thing\nfrom pkg.low._inner import helper\n",
        "high/second.py": "def late():\n    from pkg.high import third\n    return third\n",
        "high/third.py": "from pkg.high import second\n\nclass Thing:\n    pass\n",
        "low/__init__.py": "from pkg.low._inner import Thing\nfrom pkg.low import _fast_kernel\n",
        "low/_inner.py": (
            '"""Doc.\n\nMore.\n"""\n\n# A comment.\nclass Thing:\n    """A thing."""\n\n'
            '    size = 1\n    """Of it."""\n\n\nhelper = """a\nb"""\n'
        ),
        "low/_fast_kernel.py": "x = 1\n",
    }
    for name, text in files.items():
        file = tmp_path / "src" / "pkg" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    size = golden.Size.of(tmp_path)
    assert size.lines == {"__init__": 0, "high": 8, "low": 7}
    assert size.modules == 8
    assert size.single == {
        "pkg.high.second": "pkg.high.third",
        "pkg.high.third": "pkg.high.second",
        "pkg.low._inner": "pkg.high.first",
    }
    assert size.unused == ["pkg.high.first"]
    assert size.private == [("pkg.high.first", "pkg.low._inner")]
    assert size.cycles == []
    assert size.lazy_cycles == [["pkg.high.second", "pkg.high.third"]]
    assert size.repeated == {"Thing": ["pkg.high.third", "pkg.low._inner"]}
    assert golden.main(["size", "--tree", str(tmp_path)]) == 0
    assert "modules with exactly one importer: 3 (38%)" in capsys.readouterr().out


def test_parameters_that_changed_on_purpose_are_accepted_by_name_only():
    before = {"name/joma:f": ["x"], "name/joma:g": ["x"]}
    after = {"name/joma:f": ["y"], "name/joma:g": ["y"]}
    renames = golden.Renames({"changed": {"names": {"joma:f": "y is what it is"}}})
    found = golden.compare_part("surface", before, after, renames)
    assert found.counts["changed"] == 1
    assert [key for key, *_ in found.differences] == ["name/joma:g"]
