from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster import hierarchy
from torch import Tensor

from joma.analysis.node_contexts import LayerContexts, SearchSettings, dealt, spread
from joma.analysis.node_examples import examples, tables
from joma.analysis.superposition import (
    LayerScores,
    SearchResult,
    best_pairs,
    check,
    estimate,
    search,
    unrelated_groups,
)
from joma.models import find_weights

pytest.importorskip("transformers", reason="needs transformers")

from tests.experiments import _planted


def cosines(seed: int, nodes: int = 30, k: int = 12, size: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(nodes, k, size, generator=generator, dtype=torch.float64)
    units = torch.nn.functional.normalize(vectors, dim=-1)
    return units @ units.mT


def strengths(seed: int, nodes: int = 30, k: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(nodes, k, generator=generator, dtype=torch.float64) ** 2
    return values.sort(dim=-1, descending=True).values


def groups_of(similarity: np.ndarray) -> list[set[int]]:
    """What SciPy's average linkage joins."""
    k = len(similarity)
    sets = [{i} for i in range(k)]
    joined = hierarchy.linkage((1 - similarity)[np.triu_indices(k, 1)], "average")
    for one, other, *_ in joined:
        sets.append(sets[int(one)] | sets[int(other)])
    return sets[k:]


def plain_score(similarity: np.ndarray, values: np.ndarray, least: int, balance: float) -> float:
    """The best pair of groups by loops."""

    def inside(group: set[int]) -> float:
        return float(np.mean([similarity[i, j] for i in group for j in group if i != j]))

    best = 0.0
    groups = [group for group in groups_of(similarity) if len(group) >= least]
    for one in groups:
        for other in groups:
            weaker, stronger = sorted(np.mean([values[i] for i in g]) for g in (one, other))
            if one & other or weaker < balance * stronger:
                continue
            across = float(np.mean([similarity[i, j] for i in one for j in other]))
            best = max(best, min(inside(one), inside(other)) - max(across, 0))
    return best


@pytest.mark.parametrize(("least", "balance"), [(2, 0.2), (3, 0.5), (4, 0.9)])
def test_scores_against_loops(least: int, balance: float):
    similarity, values = cosines(1), strengths(1)
    found = best_pairs(similarity, values, least, balance)
    expected = [
        plain_score(s, v, least, balance)
        for s, v in zip(similarity.numpy(), values.numpy(), strict=True)
    ]
    np.testing.assert_allclose(found.score, expected, atol=2e-4)  # the larger of equals is taken
    assert np.count_nonzero(expected) > 0
    for row, score in enumerate(found.score.tolist()):
        one, other = found.groups[row]
        if score == 0:
            assert not one.any()
            continue
        assert not (one & other).any()
        assert min(int(one.sum()), int(other.sum())) >= least
        assert int(one.int().argmax()) < int(other.int().argmax())  # the strongest first
        looser, across = float(found.inside[row]), float(found.across[row])
        assert score == pytest.approx(looser - max(across, 0))


def blocks(*sizes: int, inside: float = 0.9, across: float = 0.0) -> Tensor:
    """Similarities of groups one after another."""
    which = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    same = which.unsqueeze(-1) == which
    similarity = torch.where(same, inside, across)
    return similarity.fill_diagonal_(1.0).double()


def test_two_unrelated_groups_score_and_one_or_none_does_not():
    values = torch.ones(1, 12, dtype=torch.float64)

    def score(similarity: Tensor) -> float:
        return float(best_pairs(similarity.unsqueeze(0), values, 4, 0.5).score)

    assert score(blocks(6, 6)) == pytest.approx(0.9)
    assert score(blocks(6, 6, across=0.7)) == pytest.approx(0.2)
    assert score(blocks(6, 6, across=-0.5)) == pytest.approx(0.9)  # opposite is but unrelated
    assert score(blocks(12)) == 0
    assert score(blocks(*[1] * 12)) == 0
    assert score(blocks(9, 3)) == 0  # too few in the second
    found = best_pairs(blocks(6, 6).unsqueeze(0), values, 4, 0.5)
    assert found.groups.sum(-1).tolist() == [[6, 6]]  # whole groups, not parts as tight


def test_both_groups_must_be_strong():
    values = torch.tensor([[1.0] * 6 + [0.4] * 6], dtype=torch.float64)
    similarity = blocks(6, 6).unsqueeze(0)
    assert float(best_pairs(similarity, values, 4, 0.5).score) == 0
    assert float(best_pairs(similarity, values, 4, 0.3).score) == pytest.approx(0.9)


def test_a_third_unrelated_group_is_reported_and_a_related_one_is_not():
    values = torch.ones(12, dtype=torch.float64)
    for similarity, count in ((blocks(4, 4, 4), 3), (blocks(6, 6), 2)):
        pair = best_pairs(similarity.unsqueeze(0), values.unsqueeze(0), 4, 0.5).groups[0]
        found = unrelated_groups(similarity, values, pair, 4, 0.5, above=0.3)
        assert len(found) == count
        assert sum(int(group.sum()) for group in found) == 12
    nothing = torch.zeros(2, 12, dtype=torch.bool)
    assert unrelated_groups(blocks(12), values, nothing, 4, 0.5, above=0.3) == []


COMMON = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
GATED = {**COMMON, "intermediate_size": 120, "num_key_value_heads": 2}
SHARED: dict[str, dict[str, Any]] = {
    "llama": GATED,
    "gemma": {**GATED, "head_dim": 4},
    "opt": {**COMMON, "ffn_dim": 120, "word_embed_proj_dim": 16},  # flattens its batch
    "gpt_neox": {**COMMON, "intermediate_size": 120},
    "bert": {**COMMON, "intermediate_size": 120},
    "gpt2": {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32,
             "n_inner": 120},
}  # fmt: skip


def tiny(seed: int = 0, kind: str = "llama"):
    """A random model of two layers, and windows of random tokens."""
    import transformers

    from joma.models import Loaded

    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **SHARED[kind])
    head = "MaskedLM" if kind == "bert" else "CausalLM"
    make = getattr(transformers, f"AutoModelFor{head}").from_config
    model = make(config).eval().requires_grad_(False)
    loaded = Loaded(model, None, "tiny", 32)
    return loaded, torch.randint(50, (80, 14), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", SHARED)
def test_contexts_and_rows_are_those_of_the_whole_model(kind: str):
    loaded, windows = tiny(1, kind)
    how = SearchSettings(contexts=6, least=3, skip=4, repeat=2)
    found = search(loaded, windows, layers=[1, 0], nodes=100, settings=how, seed=3)
    seen = [layer.observed for layer in found.layers]
    assert [of.layer for of in seen] == [1, 0]
    model: Any = loaded.model
    model.set_attn_implementation("eager")
    hidden: dict[int, Tensor] = {}
    for layer in range(2):
        path = find_weights(model).mlps[layer].down_path
        assert path is not None
        down = model.get_submodule(path)
        assert not down._forward_pre_hooks  # nothing of the observation is left

        def keep(_, inputs, layer=layer):
            hidden[layer] = inputs[0].view(80, 14, -1)

        down.register_forward_pre_hook(keep)
    attentions = model(input_ids=windows, output_attentions=True).attentions
    for of in seen:
        assert of.rows.shape[1] == 14
        assert len(of.nodes) + of.left_out == 100
        places, positions = of.places
        expected = attentions[of.layer].mean(1)[places, positions]
        torch.testing.assert_close(of.rows, expected, atol=1e-6, rtol=1e-5)
        for row, node in enumerate(of.nodes.tolist()):
            best = by_hand(hidden[of.layer][..., node], windows, how)
            assert list(zip(of.windows[row].tolist(), of.positions[row].tolist(), strict=True)) == (
                best
            )
            values = hidden[of.layer][of.windows[row], of.positions[row], node]
            torch.testing.assert_close(of.values[row], values)
        assert torch.equal(places[of.index], of.windows)
        assert torch.equal(positions[of.index], of.positions)


def by_hand(activations: Tensor, windows: Tensor, how: SearchSettings) -> list[tuple[int, int]]:
    """The best position of each window, best first, without repeated last tokens."""
    best = []
    for window, row in enumerate(activations.tolist()):
        value, position = max((v, -p) for p, v in enumerate(row) if p >= how.skip)
        best.append((-value, window, -position))
    found: dict[tuple[int, ...], tuple[int, int]] = {}
    for value, window, position in sorted(best)[: 2 * how.contexts]:
        if value < 0:
            last = tuple(windows[window, position + 1 - how.repeat : position + 1].tolist())
            found.setdefault(last, (window, position))
    return list(found.values())[: how.contexts]


def seen_by_hand(
    tokens: Tensor, contexts: list[list[tuple[int, int]]], rows: Tensor
) -> LayerContexts:
    """Nodes with the given (window, position); `rows` (W, T, T) are all attention rows."""
    length = tokens.shape[1]
    places = torch.tensor([[w * length + p for w, p in own] for own in contexts])
    every = torch.unique(places)
    return LayerContexts(
        layer=0,
        nodes=torch.arange(len(contexts)),
        left_out=0,
        values=torch.ones(places.shape),
        windows=places // length,
        positions=places % length,
        rows=rows[every // length, every % length],
        index=torch.searchsorted(every, places),
    )


def random_contexts(seed: int, nodes: int = 12, k: int = 6) -> tuple[LayerContexts, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, (50, 8), generator=generator)
    windows = [torch.randperm(50, generator=generator)[:k].tolist() for _ in range(nodes)]
    contexts = [
        [(w, int(torch.randint(8, (), generator=generator))) for w in own] for own in windows
    ]
    return seen_by_hand(tokens, contexts, torch.rand(50, 8, 8, generator=generator)), tokens


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000))
def test_dealing_changes_who_answers_and_nothing_else(seed: int):
    observed, tokens = random_contexts(seed)
    windows, positions = observed.places
    result = dealt(observed, tokens, torch.Generator().manual_seed(seed))
    assert not torch.equal(result, observed.index)
    assert torch.equal(result.flatten().sort().values, observed.index.flatten().sort().values)
    before, after = (tokens[windows[of], positions[of]] for of in (observed.index, result))
    assert torch.equal(before, after)  # every place keeps its query token
    clashes = [len(row) - len(set(row)) for row in windows[result].tolist()]
    assert sum(clashes) == 0
    again = dealt(observed, tokens, torch.Generator().manual_seed(seed))
    assert torch.equal(result, again)


def test_dealing_ends_where_windows_cannot_differ():
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    tokens[0, 5] = 1
    contexts = [[(0, 5), (1, 2)], [(0, 5), (1, 3)]]
    observed = seen_by_hand(tokens, contexts, torch.rand(4, 8, 8))
    result = dealt(observed, tokens, torch.Generator().manual_seed(0))
    assert result[:, 0].tolist() == observed.index[:, 0].tolist()


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search(_planted.planted(), _planted.text())


def test_the_planted_node_is_found_and_beats_both_controls(found: SearchResult):
    (layer,) = found.layers
    assert layer.observed.left_out == 0
    assert layer.pairs.score[_planted.SUPERPOSED] > 0.9
    assert layer.above_shuffled[_planted.SUPERPOSED]
    assert layer.above_untrained[_planted.SUPERPOSED]
    assert found.ranked()[0] == (0, _planted.SUPERPOSED)


def test_nodes_of_one_pattern_are_not_found(found: SearchResult):
    (layer,) = found.layers
    others = torch.arange(_planted.NODES) != _planted.SUPERPOSED
    assert layer.pairs.score[others].max() < 0.05
    assert not layer.above_shuffled[others].any()
    assert not layer.above_untrained[others].any()


def test_one_node_is_no_finding_about_the_model(found: SearchResult):
    assert found.share_above_shuffled == pytest.approx(1 / _planted.NODES)
    assert not found.beats_shuffled
    assert "does not beat its controls" in found.finding


def test_the_contexts_reported_are_those_planted(found: SearchResult):
    (node,) = examples(found, _planted.planted(), _planted.text(), 1)
    assert (node.layer, node.node) == (0, _planted.SUPERPOSED)
    assert node.p_shuffled < 0.05
    assert node.p_untrained == pytest.approx(1 / (1 + _planted.NODES))
    assert node.p_own < 0.1
    words = [{int(word) for word in group.words} for group in node.groups]
    assert sorted(map(min, words)) == [min(_planted.topic(number)) for number in _planted.TWO]
    assert all(len(of) == _planted.PER_TOPIC for of in words)
    windows = _planted.text()
    for group, topic in zip(node.groups, words, strict=True):
        for context in group.contexts:
            tokens = windows[context.window].tolist()
            shown = tokens[: context.position + 1]
            assert context.pieces == tuple(f" {token}" for token in shown)
            assert context.query == context.position
            assert sum(context.attention) == pytest.approx(1, abs=1e-4)
            assert {token for token, bold in zip(shown, context.attended, strict=True) if bold} < (
                topic
            )
    record = node.as_json()
    assert record["groups"][0]["contexts"][0]["query"] == node.groups[0].contexts[0].query


def test_tables_have_every_score(found: SearchResult):
    loaded, windows = _planted.planted(), _planted.text()
    made = tables(found, examples(found, loaded, windows, 1))
    assert made["nodes"]["node"] == list(range(_planted.NODES))
    assert made["nodes"]["score"] == found.layers[0].pairs.score.tolist()
    assert made["nodes"]["above_shuffled"].count(True) == 1
    assert made["controls"]["control"].count("untrained") == len(found.layers[0].untrained)
    assert set(made["contexts"]["group"]) == {"A", "B"}
    assert made["layers"]["nodes"] == [_planted.NODES]


def test_the_seed_decides_every_number():
    loaded, windows = tiny(2)
    how = SearchSettings(contexts=6, least=3, skip=4)
    one, two, other = (
        search(loaded, windows, nodes=100, settings=how, seed=seed) for seed in (1, 1, 2)
    )
    assert one.scores() == two.scores()
    assert one.scores() != other.scores()
    assert one.finding == two.finding


def test_random_weights_do_not_beat_random_weights():
    """An untrained model has nothing that another untrained one has not."""
    loaded, windows = tiny(3)
    result = search(loaded, windows, settings=SearchSettings(contexts=8, least=3, skip=4))
    assert not result.beats_untrained
    assert not result.beats_shuffled


def scored(score: list[float], shuffled: list[float], untrained: list[float]) -> SearchResult:
    pairs: Any = SimpleNamespace(score=torch.tensor(score))
    of = (torch.tensor(shuffled), torch.tensor(untrained), torch.tensor(untrained))
    layer = LayerScores(None, torch.zeros(1, 1), pairs, *of)  # type: ignore[arg-type]
    return SearchResult((layer,), SearchSettings())


def test_what_is_said_follows_from_the_scores():
    low, high = [0.1] * 1000, [0.1] * 900 + [0.9] * 100
    cases = {
        (True, True): scored(high, low, low),
        (True, False): scored(high, low, high),
        (False, True): scored(high, high, low),
        (False, False): scored(low, low, low),
    }
    for (shuffled, untrained), result in cases.items():
        assert (result.beats_shuffled, result.beats_untrained) == (shuffled, untrained)
    said = [result.finding for result in cases.values()]
    assert "10.0% score above 99% of shuffled contexts" in said[0]
    assert "beats both controls, and beyond chance 9.0% of its nodes answer" in said[0]
    assert "beats shuffled contexts but not the untrained model" in said[1]
    assert "beats the untrained model but not shuffled contexts" in said[2]
    assert "does not beat its controls" in said[3]
    assert "nothing can be said" in scored([], [], []).finding


def test_windows_are_spread_over_the_text():
    windows = torch.arange(10).unsqueeze(-1)
    assert spread(windows, 4).flatten().tolist() == [0, 2, 5, 7]
    assert spread(windows, 20) is windows


def test_what_a_search_takes_is_estimated():
    loaded, windows = tiny(4)
    seconds, memory = estimate(loaded, windows)
    assert 0 < seconds < 60
    assert 5e8 < memory < 2e9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windows": torch.zeros(15, 14, dtype=torch.int64)}, "windows must be at least 16"),
        ({"windows": torch.zeros(40, 8, dtype=torch.int64)}, "window must be at least 9 tokens"),
        (
            {"windows": torch.zeros(40, 33, dtype=torch.int64)},
            "tokens and at most 32",
        ),
        ({"layers": [0, 2]}, "layers must lie from 0 to 1, got 2"),
        ({"nodes": 99}, "nodes must be at least 100"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str):
    loaded, windows = tiny(5)
    arguments: dict[str, Any] = {"windows": windows} | changes
    with pytest.raises(ValueError, match=message):
        check(loaded, **arguments)
    with pytest.raises(ValueError, match=message):
        search(loaded, **arguments)
