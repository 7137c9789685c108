"""Recorded curves from CSV files."""

import pytest

from joma.errors import JomaError
from joma.report.html import read_reference

METRICS = {"loss", "validation_loss", "attention_entropy"}


def _write(tmp_path, text):
    path = tmp_path / "curves.csv"
    path.write_text(text)
    return path


def test_a_column_for_each_metric(tmp_path):
    path = _write(tmp_path, "seed,step,layer,attention_entropy\n1,10,0,2\n1,0,0,3\n1,0,1,4\n")
    curves = read_reference(path, METRICS)["curves"]
    assert [(it["layer"], it["steps"], it["values"]) for it in curves] == [
        (0, [0, 10], [3.0, 2.0]),
        (1, [0], [4.0]),
    ]
    assert curves[0]["labels"] == {"seed": "1"}


def test_metric_and_value(tmp_path):
    path = _write(tmp_path, "step,metric,value\n0,loss,3\n1,loss,nan\n0,other,1\n")
    (curve,) = read_reference(path, METRICS)["curves"]
    assert (curve["metric"], curve["values"]) == ("loss", [3.0, None])


def test_other_names_of_the_losses(tmp_path):
    (curve,) = read_reference(_write(tmp_path, "step,val_loss\n0,3\n"), METRICS)["curves"]
    assert curve["metric"] == "validation_loss"


def test_where_chooses_rows_by_number(tmp_path):
    path = _write(tmp_path, "step,lr,loss\n0,0.0010,3\n0,0.01,4\n")
    (curve,) = read_reference(path, METRICS, {"lr": "1e-3"})["curves"]
    assert curve["values"] == [3.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", 'columns "step"'),
        ("", 'columns "step"'),
        ("step,loss\n1.5,2\n", "whole number"),
        ("step,loss\n1,two\n", "line 2"),
        ("step,loss\n1\n", "must have 2 entries"),
        ("step,loss\n1,2,3\n", "must have 2 entries"),
        ("step,metric,value\n0,other,1\n", "no rows"),
        ("step,seed,loss\n" + "".join(f"0,{k},1\n" for k in range(50)), "--where COLUMN=VALUE"),
    ],
)
def test_other_files_are_refused_in_a_sentence(tmp_path, text, words):
    with pytest.raises(JomaError, match=words):
        read_reference(_write(tmp_path, text), METRICS)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(JomaError, match="does not exist"):
        read_reference(tmp_path / "none.csv", METRICS)
    (tmp_path / "curves.csv").write_bytes(b"\xff\xfe\x00step")
    with pytest.raises(JomaError, match="cannot be read"):
        read_reference(tmp_path / "curves.csv", METRICS)
    with pytest.raises(JomaError, match="no column 'lr'"):
        read_reference(_write(tmp_path, "step,loss\n0,1\n"), METRICS, {"lr": "1"})
