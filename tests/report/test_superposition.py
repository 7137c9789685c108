import numpy as np

from joma.report import superposition
from joma.report.figures import save
from joma.runs import Run


def context(*pieces: str) -> dict:
    return {
        "activation": 2.5,
        "pieces": list(pieces),
        "attention": [0.1 * place for place in range(len(pieces))],
        "attended": [place == 1 for place in range(len(pieces))],
        "query": len(pieces) - 1,
    }


def written(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_contexts_end_at_the_query_and_hold_only_signs_that_can_be_drawn(tmp_path):
    node = {
        "groups": [
            {"words": ["one", "$x$"], "contexts": [context("far" * 60, " one", " 数\n", " end")]},
            {"words": [], "contexts": [context("a", "b", "")]},
        ]
    }
    figure = superposition.draw_contexts(node)
    texts = written(figure)
    assert "A attends to: one, $x$" in texts
    assert "B" in texts
    assert " one" in texts  # in bold, so by itself
    assert " □↵" in texts
    cut = "".join(text for text in texts if set(text) <= set("far") and text != "a")
    assert len(cut) == superposition.COLUMNS - len(" one 数\n end")
    run = Run.create("superposition", {}, out=tmp_path / "run")
    save(run, "contexts", figure, title="Contexts", caption="of a node")  # warns of no glyph


def test_scores_are_shares_of_nodes():
    figure = superposition.draw_scores(
        {"model": [0.1, 0.5, 0.9, 0.2], "shuffled": [0.1, 0.2], "untrained": []}
    )
    model, shuffled = figure.axes[0].lines[:2]
    assert np.asarray(model.get_xdata()).tolist() == [0.1, 0.2, 0.5, 0.9]
    assert np.asarray(model.get_ydata()).tolist() == [1, 0.75, 0.5, 0.25]
    assert np.asarray(shuffled.get_ydata()).tolist() == [1, 0.5]
