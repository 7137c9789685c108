"""Language models in an ensemble against one network of torch's own, trained by a plain loop."""

import pytest
import torch
from torch import Tensor, nn

from joma.models import LanguageConfig, LanguageModel
from joma.optim import StackedAdam
from joma.train import Ensemble
from tests.models.test_language import by_torch

CONFIG = LanguageConfig(vocabulary=40, layers=2, width=12, hidden=16, length=7, dropout=0.0)
STREAMS = torch.randint(40, (3, 64), generator=torch.Generator().manual_seed(0))
EPOCH = 9
RATES = (1e-2, 3e-3)


def batch(step: Tensor | int) -> tuple[Tensor, Tensor]:
    start = 7 * (int(step) % EPOCH)
    return STREAMS[:, start : start + 7], STREAMS[:, start + 1 : start + 8]


def trained(config: LanguageConfig, seeds: tuple[int, ...], rates: tuple[float, ...]) -> Ensemble:
    model = LanguageModel(config, seeds, dtype=torch.float64)
    return Ensemble(
        model,
        StackedAdam(model.named_parameters(), rates, clip=0.5),
        batch,
        loss=lambda model, pair, step: model.losses(*pair, step=step),
        precision="float64",
        restart_every=EPOCH,
    )


def test_each_member_learns_as_torchs_encoder_does_alone() -> None:
    ours = trained(CONFIG, (1, 2), RATES)
    ours.advance(2 * EPOCH + 3)
    _, losses = ours.losses()
    for member, rate in enumerate(RATES):
        alone = LanguageModel(CONFIG, (member + 1,), dtype=torch.float64)
        adam, expected = torch.optim.Adam(alone.parameters(), rate), []
        for step in range(2 * EPOCH + 3):
            if step % EPOCH == 0:
                adam = torch.optim.Adam(alone.parameters(), rate)
            tokens, targets = batch(step)
            loss = alone.losses(tokens, targets)[0]
            reference = nn.functional.cross_entropy(
                by_torch(alone, 0, tokens).flatten(0, 1), targets.flatten()
            )
            torch.testing.assert_close(loss, reference)
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            adam.step()
            expected.append(loss.item())
        assert losses[:, member].tolist() == pytest.approx(expected, rel=1e-6)


def test_a_member_with_dropout_learns_the_same_alone_and_among_others() -> None:
    config = LanguageConfig(vocabulary=40, layers=2, width=12, hidden=16, length=7)
    both, alone = trained(config, (1, 2), RATES), trained(config, (2,), RATES[1:])
    for ensemble in (both, alone):
        ensemble.advance(EPOCH + 2)
    torch.testing.assert_close(both.losses()[1][:, 1:], alone.losses()[1])
