"""The residual of Theorem 1: nought in a training the theorem is of, not where it is not.

The layer is torch's own encoder layer, made into JoMA's block: one query, which attends to the
tokens before it and not to itself, orthonormal embeddings, values as they are, no norms, logits
that are weights of their own, and an output that hears of the tokens through the MLP alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import joma
from joma.runs import Run
from tests.train._watched import of_run

TOKENS, NODES, CLASSES = 16, 24, 3
WIDTH = TOKENS + 1 + CLASSES


def turned(size: int) -> Tensor:
    """A rotation, of no concern to anything else."""
    dice = torch.Generator().manual_seed(5)
    return torch.linalg.qr(torch.randn(size, size, generator=dice)).Q


class Block(nn.Module):
    """Tells the class of a sequence of tokens that a query ends; the query's number is TOKENS."""

    def __init__(
        self,
        *,
        queries: int = 1,
        activation: Callable[[Tensor], Tensor] = functional.relu,
        normed: bool = False,
        past_the_mlp: bool = False,
        value: Tensor | None = None,
        overlap: float = 0.0,
        logits: float = 0.0,
    ) -> None:
        super().__init__()
        width = WIDTH + queries - 1
        table = torch.eye(width)
        words = TOKENS + queries
        table[:words, :words] += overlap * turned(words)
        self.table = nn.Embedding.from_pretrained(table / table.norm(dim=1, keepdim=True))
        self.block = nn.TransformerEncoderLayer(
            width, 1, NODES, 0.0, activation, batch_first=True, bias=False
        )
        if not normed:
            self.block.norm1 = nn.Identity()  # type: ignore[assignment]
        self.block.norm2 = nn.Identity()  # type: ignore[assignment]
        attention = self.block.self_attn
        with torch.no_grad():
            query, key, own = attention.in_proj_weight.chunk(3)
            query.zero_()
            query[:TOKENS, TOKENS] = logits * torch.randn(TOKENS)
            key.copy_(torch.eye(width))
            own.copy_(torch.eye(width) if value is None else value)
            attention.out_proj.weight.copy_(torch.eye(width))
            self.block.linear1.weight.normal_(0, 0.5)
        attention.out_proj.weight.requires_grad_(False)
        learned = torch.zeros(3 * width, 1).index_fill_(0, torch.arange(width), 1)
        attention.in_proj_weight.register_hook(lambda gradient: gradient * learned)
        self.output = nn.Linear(width, CLASSES, bias=False)
        if not past_the_mlp:  # no token is there
            self.output.weight = nn.Parameter(torch.eye(width)[-CLASSES:], requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        hidden = torch.arange(length).expand(length, -1) == length - 1  # the query, to all
        return self.output(self.block(self.table(tokens), src_mask=hidden)[:, -1])


def sequences(
    classes: Tensor, counts: Tensor, apart: float, queries: int, dice: torch.Generator
) -> Tensor:
    """All of the same tokens, each as often as it counts; the further apart, the more of its own.

    Args:
        classes: of the sequences, (N,).
        counts: of the tokens, (TOKENS,).
        apart: share of tokens that are drawn from what is usual in a class.
        queries: of which one ends each sequence.
        dice: to draw with.
    """
    alike = torch.arange(TOKENS).repeat_interleave(counts)
    usual = torch.stack([torch.linspace(1, 0, TOKENS).square().roll(5 * k) for k in range(CLASSES)])
    drawn = torch.multinomial(usual[classes], len(alike), True, generator=dice)
    own = torch.rand(drawn.shape, generator=dice) < apart
    ends = TOKENS + torch.randint(queries, (len(classes), 1), generator=dice)
    return torch.cat([drawn.where(own, alike), ends], 1)


def trained(
    folder: Path,
    *,
    seed: int = 0,
    steps: int = 60,
    every: int = 20,
    rate: float = 0.3,
    logit_rate: float = 0.03,
    counts: Tensor | None = None,
    apart: float = 0.0,
    queries: int = 1,
    adam: bool = False,
    **options: Any,
) -> tuple[list[float], list[float]]:
    """The residuals of a training, and its first and last loss."""
    counts = torch.full((TOKENS,), 2) if counts is None else counts
    dice = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Block(queries=queries, **options)
    classes = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), 64, True, generator=dice)
    tokens = sequences(classes, counts, apart, queries, dice)
    inputs = torch.cat([torch.arange(TOKENS).repeat_interleave(counts), torch.tensor([TOKENS])])
    logits = model.block.self_attn.in_proj_weight
    rest = [p for p in model.parameters() if p.requires_grad and p is not logits]
    groups = [{"params": rest, "lr": rate}, {"params": [logits], "lr": logit_rate}]
    optimizer = torch.optim.Adam(groups) if adam else torch.optim.SGD(groups)
    with joma.Monitor(
        model,
        every=every,
        run=folder,
        inputs=inputs.unsqueeze(0),
        budget=None,
        theorem1=0,
        metrics=["theorem1_residual"],
    ) as monitor:
        for _ in range(steps):
            loss = functional.cross_entropy(model(tokens), classes)
            loss.backward()
            optimizer.step()
            monitor.step(loss)
            optimizer.zero_grad()
    run = Run.open(folder)
    losses = of_run(run, "loss")[1]
    return of_run(run, "theorem1_residual")[1], [losses[0], losses[-1]]


UNEVEN = 1 + torch.arange(TOKENS) // 4
"""How often each token comes: 1 to 4 times."""


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": torch.tanh},
        {"logit_rate": 3.0},  # ten times as fast as the MLP
        {"counts": UNEVEN},
    ],
    ids=["relu", "tanh", "fast logits", "uneven tokens"],
)
def test_it_is_nought_where_the_theorem_holds(
    tmp_path: Path, seed: int, options: dict[str, Any]
) -> None:
    residuals, (first, last) = trained(tmp_path / "run", seed=seed, **options)
    assert last < first - 0.01
    assert len(residuals) == 8  # after steps 1, 2, 4, 8, 16, 20, 40 and 60
    assert max(map(abs, residuals)) < 1e-5


@pytest.mark.parametrize("seed", [0, 1])
def test_attention_that_is_not_even_counts_as_the_theorem_says(tmp_path: Path, seed: int) -> None:
    options: dict[str, Any] = {"seed": seed, "logits": 4.0, "counts": UNEVEN}
    residuals, _ = trained(tmp_path / "run", logit_rate=3.0, **options)
    assert max(map(abs, residuals)) < 1e-5


def test_attention_that_moves_is_followed_from_one_measurement_to_the_next(tmp_path: Path) -> None:
    options: dict[str, Any] = {"rate": 0.03, "logit_rate": 3000.0}
    for every in (1, 60):  # it moves most in the beginning, where measurements are dense
        residuals, _ = trained(tmp_path / f"{every}", every=every, **options)
        assert abs(residuals[-1]) < 0.01  # 0.03 where only the first and the last are measured


def test_sequences_that_differ_little_make_a_little(tmp_path: Path) -> None:
    residuals, (first, last) = trained(tmp_path / "run", apart=0.3)
    assert last < first - 0.2  # by what is learned of the tokens
    assert 1e-3 < residuals[-1] < 0.1


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"value": turned(WIDTH)}, 0.5),
        ({"normed": True}, 1.5),
        ({"overlap": 0.1}, 0.5),
        ({"queries": 4}, 0.2),
        ({"past_the_mlp": True}, 0.2),
        ({"apart": 1.0, "steps": 100}, 0.1),
        ({"adam": True, "rate": 3e-3, "logit_rate": 3e-4}, 0.05),
    ],
    ids=["value", "norm", "overlap", "queries", "past the MLP", "sequences apart", "adam"],
)
def test_it_is_not_where_one_assumption_fails(
    tmp_path: Path, options: dict[str, Any], least: float
) -> None:
    residuals, (first, last) = trained(tmp_path / "run", **options)
    assert last < first - 0.01
    assert residuals[-1] > least
