"""Counter-based random numbers: known answers, statistics, and independence of everything else."""

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from joma import random

few = settings(max_examples=30, deadline=None)
any_seed = st.integers(-(2**63), 2**63 - 1)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DRAWS = {
    "words": random.words,
    "uniform": random.uniform,
    "uniform64": lambda *place: random.uniform(*place, dtype=torch.float64),
    "normal": random.normal,
    "normal64": lambda *place: random.normal(*place, dtype=torch.float64),
    "integers": lambda *place: random.integers(*place, below=1000),
}


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python integers, word by word."""
    c, k, word = list(counter), list(key), 2**32
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            second // word ^ c[1] ^ k[0],
            second % word,
            first // word ^ c[3] ^ k[1],
            first % word,
        ]
        k = [(k[0] + 0x9E3779B9) % word, (k[1] + 0xBB67AE85) % word]
    return c


# Known answers of the Random123 library's own tests (kat_vectors, philox4x32 10).
KNOWN = [
    ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: list[int], key: list[int], answer: str):
    expected = [int(word, 16) for word in answer.split()]
    assert philox(counter, key) == expected


@given(any_seed, st.text(max_size=5), st.integers(0, 2**63 - 1), st.integers(1, 9))
@few
def test_words_are_philox_of_seed_stream_step_and_place(seed: int, stream: str, step: int, n: int):
    key = [seed % 2**32, seed // 2**32 % 2**32]
    rest = [zlib.crc32(stream.encode()), step % 2**32, step // 2**32]
    expected = [philox([j // 4, *rest], key)[j % 4] for j in range(n)]
    seeds = torch.tensor([seed])
    assert random.words(seeds, stream, step, n).tolist() == [expected]
    assert random.words(seeds, stream, torch.tensor(step), n).tolist() == [expected]


@pytest.mark.parametrize("name", DRAWS)
@given(st.lists(any_seed, min_size=1, max_size=6, unique=True), st.integers(1, 300), st.data())
@few
def test_a_member_draws_alone_what_it_draws_among_others(
    name: str, seeds: list[int], n: int, data: st.DataObject
):
    member = data.draw(st.integers(0, len(seeds) - 1))
    together = DRAWS[name](torch.tensor(seeds), "stream", 7, n)
    alone = DRAWS[name](torch.tensor(seeds[member : member + 1]), "stream", 7, n)
    assert together.shape == (len(seeds), n)
    assert torch.equal(together[member : member + 1], alone)


@pytest.mark.parametrize("name", DRAWS)
def test_members_may_each_have_a_step(name: str):
    seeds, steps = torch.tensor([3, 3, -5]), torch.tensor([0, 2**40 + 1, 7])
    together = DRAWS[name](seeds, "stream", steps, 37)
    for member, step in enumerate(steps.tolist()):
        alone = DRAWS[name](seeds[member : member + 1], "stream", step, 37)
        assert torch.equal(together[member : member + 1], alone)


@pytest.mark.parametrize("name", DRAWS)
def test_parts_make_the_whole(name: str, monkeypatch: pytest.MonkeyPatch):
    seeds = torch.arange(3)
    whole = DRAWS[name](seeds, "stream", 1, 203)
    assert torch.equal(DRAWS[name](seeds, "stream", 1, 50), whole[:, :50])
    monkeypatch.setitem(random._BLOCKS_AT_ONCE, "cpu", 12)
    assert torch.equal(DRAWS[name](seeds, "stream", 1, 203), whole)


def neighbours(kind: str, n: int) -> np.ndarray:
    """Eight sequences of uniforms that differ in one thing alone, shape (8, n)."""
    seeds = torch.arange(8)
    if kind == "seed":
        return random.uniform(seeds, "a", 0, n).double().numpy()
    if kind == "high half of the seed":
        return random.uniform(seeds << 32, "a", 0, n).double().numpy()
    places = {
        "step": [("a", i) for i in range(8)],
        "high half of the step": [("a", i << 32) for i in range(8)],
        "stream": [(letter, 0) for letter in "abcdefgh"],
    }[kind]
    return torch.cat([random.uniform(seeds[:1], *place, n) for place in places]).double().numpy()


KINDS = ["seed", "high half of the seed", "step", "high half of the step", "stream"]


@pytest.mark.parametrize("kind", KINDS)
def test_neighbouring_sequences_are_uniform_and_uncorrelated(kind: str):
    n = 50_000
    draws = neighbours(kind, n)
    for row in draws:
        counts = np.bincount((row * 256).astype(int), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-5
        for power in (1, 2, 3):
            error = np.sqrt((1 / (2 * power + 1) - 1 / (power + 1) ** 2) / n)
            assert abs((row**power).mean() - 1 / (power + 1)) < 4.5 * error
        for lag in (1, 2, 3, 4, 8):
            assert abs(np.corrcoef(row[:-lag], row[lag:])[0, 1]) < 4.5 / np.sqrt(n)
    between = np.corrcoef(draws) - np.eye(8)
    assert np.abs(between).max() < 4.5 / np.sqrt(n)
    pairs = (draws[0] * 16).astype(int) * 16 + (draws[1] * 16).astype(int)
    assert stats.chisquare(np.bincount(pairs, minlength=256)).pvalue > 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_is_standard_normal(dtype: torch.dtype):
    drawn = random.normal(torch.arange(2), "a", 0, 100_001, dtype=dtype)
    assert drawn.dtype == dtype
    for row in drawn.double().numpy():
        assert stats.kstest(row, "norm").pvalue > 1e-4
        assert abs(np.corrcoef(row[:-1], row[1:])[0, 1]) < 4.5 / np.sqrt(row.size)
        # A Box–Muller pair has uncorrelated squares too.
        assert abs(np.corrcoef(row[:-1:2] ** 2, row[1::2] ** 2)[0, 1]) < 4.5 / np.sqrt(row.size / 2)


def test_the_smallest_and_the_largest_word(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(random, "_philox", lambda *given: given[-1].fill_(2**32 - 1))
    for dtype in (torch.float32, torch.float64):
        drawn = random.uniform(torch.arange(2), "a", 0, 5, dtype=dtype)
        assert drawn.dtype == dtype
        assert drawn.max() == 1 - torch.finfo(dtype).eps / 2
    monkeypatch.setattr(random, "_philox", lambda *given: given[-1].zero_())
    # Word 0 is the uniform 2⁻³², at angle 0: √(2·32·ln 2) and 0.
    expected = torch.tensor([[np.sqrt(64 * np.log(2)), 0.0] * 2], dtype=torch.float64)
    drawn = random.normal(torch.arange(1), "a", 0, 4, dtype=torch.float64)
    torch.testing.assert_close(drawn, expected)


@pytest.mark.parametrize("below", [1, 2, 20, 1000])
def test_integers_are_equally_likely(below: int):
    drawn = random.integers(torch.arange(2), "a", 0, 100_000, below).flatten().numpy()
    counts = np.bincount(drawn, minlength=below)
    assert counts.size == below
    assert below == 1 or stats.chisquare(counts).pvalue > 1e-5


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("seeds_E", lambda: random.words(torch.zeros(2), "a", 0, 1)),
        ("seeds_E", lambda: random.words(torch.zeros(0, dtype=torch.int64), "a", 0, 1)),
        ("step", lambda: random.words(torch.arange(1), "a", -1, 1)),
        ("step", lambda: random.words(torch.arange(1), "a", torch.tensor([1, 2]), 1)),
        ("n", lambda: random.uniform(torch.arange(1), "a", 0, 0)),
        ("dtype", lambda: random.uniform(torch.arange(1), "a", 0, 1, dtype=torch.float16)),
        ("below", lambda: random.integers(torch.arange(1), "a", 0, 1, 0)),
    ],
)
def test_bad_arguments_are_named(name: str, call):
    with pytest.raises(ValueError, match=rf"^{name} must be"):
        call()


@cuda
@pytest.mark.parametrize("name", DRAWS)
def test_a_captured_graph_replays_with_the_step_on_the_device(name: str):
    seeds, step = torch.arange(3, device="cuda"), torch.tensor(0, device="cuda")
    DRAWS[name](seeds, "stream", step, 100)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = DRAWS[name](seeds, "stream", step, 100)
        step += 1
    for number in range(3):
        graph.replay()
        assert torch.equal(drawn, DRAWS[name](seeds, "stream", number, 100))
