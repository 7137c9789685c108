"""Tables moved row by row against torch's Adam, which moves every row at every step."""

import pytest
import torch
from torch import Tensor, nn

from joma.models import LanguageConfig
from joma.models.full_speed import FastLanguageModel
from joma.optim.full_speed import LazyAdam
from joma.optim.full_speed.lazy_adam import LEAST_REPLAYED, corrected_steps, replayed_steps
from joma.train import Ensemble

RATES, HEIGHT, STEPS = (1e-2, 0.1), 40, 2 * LEAST_REPLAYED + 90


def batch(step: int) -> Tensor:
    """Few words come often; word 39 comes at the first step and then no more for a long time."""
    dice = torch.Generator().manual_seed(step)
    words = (torch.rand(3, 4, generator=dice) ** 4 * (HEIGHT - 1)).long()
    if step in (0, LEAST_REPLAYED + 60):
        words[0, :2] = HEIGHT - 1
    return words


def pull(rows: Tensor, step: int) -> Tensor:
    dice = torch.Generator().manual_seed(1000 + step)
    return (rows * torch.randn(rows.shape[1:], generator=dice, dtype=rows.dtype)).sum()


def table() -> Tensor:
    dice = torch.Generator().manual_seed(7)
    return torch.randn(2, HEIGHT, 3, generator=dice, dtype=torch.float64)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("restart", [None, 150])
def test_rows_are_as_if_every_step_had_moved_them(clip: float | None, restart: int | None) -> None:
    ours = nn.Parameter(table())
    optimizer = LazyAdam([("table", ours)], RATES, clip=clip, lazy=["table"])
    theirs = [nn.Parameter(member.clone()) for member in table()]

    def adams() -> list[torch.optim.Adam]:
        return [torch.optim.Adam([p], rate) for p, rate in zip(theirs, RATES, strict=True)]

    others = adams()
    for step in range(STEPS):
        if restart is not None and step and step % restart == 0:
            optimizer.restart()
            others = adams()
        words = batch(step)
        rows = optimizer.rows["table"].fetch(words, optimizer.steps)
        for member, (parameter, adam) in enumerate(zip(theirs, others, strict=True)):
            # What the network reads is what it would read had every step been made.
            torch.testing.assert_close(rows[member], parameter[words], rtol=0, atol=1e-10)
            adam.zero_grad()
            pull(parameter[words].unsqueeze(0), step).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_([parameter], clip)
            adam.step()
        pull(rows, step).backward()
        optimizer.step()
    settled = optimizer.master_weights()["table"]
    for member, parameter in enumerate(theirs):
        torch.testing.assert_close(settled[member], parameter.data, rtol=0, atol=1e-10)


def test_an_ensemble_with_lazy_embeddings_learns_and_resumes_as_without() -> None:
    config = LanguageConfig(vocabulary=60, layers=1, width=8, hidden=8, length=5)
    streams = torch.randint(60, (3, 101), generator=torch.Generator().manual_seed(0))

    def make(lazy: bool) -> Ensemble:
        model = FastLanguageModel(config, (1, 2), dtype=torch.float64)
        names = ["embedding.weight"] if lazy else []
        optimizer = LazyAdam(model.named_parameters(), RATES, clip=0.5, lazy=names)
        rows = optimizer.rows.get("embedding.weight")

        def loss(model: FastLanguageModel, start: int, step: Tensor) -> Tensor:
            window = streams[:, start : start + 6]
            weights = torch.full((3, 5), 1 / 15, dtype=torch.float64)

            def fetch(words: Tensor) -> Tensor:
                assert rows is not None
                return rows.fetch(words, optimizer.steps)

            pair = window[:, :-1], window[:, 1:]
            return model.loss_and_backward(*pair, weights, step, fetch if lazy else None)

        return Ensemble(
            model,
            optimizer,
            lambda step: 5 * (int(step) % 20),
            loss=loss,
            precision="float64",
            restart_every=20,
        )

    plain, lazy = make(False), make(True)
    for ensemble in (plain, lazy):
        ensemble.advance(33)
    again = make(True)
    again.load_state(33, {name: part.clone() for name, part in lazy.state()}, lazy.about())
    for ensemble in (plain, lazy, again):
        ensemble.advance(30)
    curves = [ensemble.losses()[1] for ensemble in (plain, lazy, again)]
    torch.testing.assert_close(curves[1], curves[0])
    torch.testing.assert_close(curves[2], curves[0][33:])
    with plain.evaluating() as one, lazy.evaluating() as other:
        # Adam makes steps of the learning rate of a gradient that is rounding alone.
        torch.testing.assert_close(other.embedding.weight, one.embedding.weight, atol=1e-4, rtol=0)


def test_weight_decay_and_lazy_tables_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="weight_decays must be 0"):
        LazyAdam([("table", nn.Parameter(table()))], RATES, weight_decays=0.1, lazy=["table"])


BETAS = [(0.9, 0.999), (0.99, 0.999), (0.95, 0.99), (0.5, 0.9999), (0.99, 0.9), (0.0, 0.0)]


@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize("gap", [300, 1500])
def test_a_row_that_waited_long_is_where_adam_would_have_it(
    betas: tuple[float, float], gap: int
) -> None:
    ours = nn.Parameter(torch.zeros(1, 2, 3, dtype=torch.float64))
    optimizer = LazyAdam([("table", ours)], 0.1, betas=betas, lazy=["table"])
    theirs = nn.Parameter(ours.data[0].clone())
    adam = torch.optim.Adam([theirs], 0.1, betas=betas, foreach=False)
    word = torch.tensor([0])
    for step in range(2):
        pull(optimizer.rows["table"].fetch(word, optimizer.steps), step).backward()
        optimizer.step()
        adam.zero_grad()
        pull(theirs[word].unsqueeze(0), step).backward()
        adam.step()
    theirs.grad = torch.zeros_like(theirs)
    for _ in range(gap):
        adam.step()
    optimizer.steps += gap
    settled = optimizer.master_weights()["table"][0]
    torch.testing.assert_close(settled, theirs.data, rtol=1e-8, atol=1e-10)


def test_how_many_steps_are_made_follows_from_the_betas() -> None:
    assert replayed_steps((0.9, 0.999)) == LEAST_REPLAYED
    assert 2600 < replayed_steps((0.99, 0.999)) < 2700
    assert replayed_steps((0.99, 0.9)) > 10**9  # updates grow: none may be left out
    for betas in BETAS:
        assert max(betas) ** corrected_steps(betas) < 2**-53


def test_betas_too_near_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^betas must be at most 0\.99999"):
        LazyAdam([("table", nn.Parameter(table()))], RATES, betas=(0.9, 1 - 1e-7), lazy=["table"])
