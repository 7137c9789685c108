"""Training a language model: its data, what a step is, and what others can read of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.random import integers
from joma.train.language._text import Feed, first_windows, read_tokens
from tests.train._language import begin, logged, make, trainer_of, write_text

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text")


@settings(deadline=None, max_examples=20)
@given(
    length=st.integers(6, 60),
    window=st.integers(1, 5),
    batch=st.integers(1, 9),
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 10**6),
)
def test_batches_are_windows_of_the_text_and_follow_from_seed_and_step(
    length: int, window: int, batch: int, seed: int, step: int
):
    tokens = np.arange(length, dtype=np.uint16)
    feed = Feed(tokens, window, batch, seed)
    drawn = feed.at(step)
    assert drawn.shape == (batch, window + 1)
    assert torch.equal(drawn, Feed(tokens.copy(), window, batch, seed).at(step))
    assert torch.all(drawn.diff() == 1)
    assert 0 <= drawn.min() <= drawn.max() < length


def test_batches_are_the_same_in_whatever_order_steps_are_read():
    """Windows of many steps are gathered at once."""
    tokens = np.arange(5000, dtype=np.uint16)
    feed = Feed(tokens, 3, 4, 5)
    for step in (*range(300), 7, 2**40, 2**40 + 1, 128, 0):
        starts = integers(torch.tensor([5]), "windows", step, 4, len(tokens) - 3)[0]
        assert torch.equal(feed.at(step), starts.unsqueeze(1) + torch.arange(4))
        assert feed.at(step).dtype == torch.int64


@cuda
@pytest.mark.parametrize("share", [0.1, 0.0])
def test_a_gpu_reads_the_same_batches(monkeypatch: pytest.MonkeyPatch, share: float):
    monkeypatch.setattr("joma.train.language._text._SHARE", share)
    tokens = np.random.default_rng(0).integers(0, 60_000, 5000).astype(np.uint16)
    here, there = (Feed(tokens, 16, 3, 5, torch.device(kind)) for kind in ("cpu", "cuda"))
    assert there.resident == (share > 0)
    for step in (*range(260), 0, 2**40):
        assert there.at(step).is_cuda
        assert torch.equal(there.at(step).cpu(), here.at(step))


def test_the_first_windows_do_not_overlap_but_for_the_token_to_predict():
    windows = first_windows(np.arange(10), 4, 99)
    assert windows.tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert len(first_windows(np.arange(10), 4, 1)) == 1


@pytest.mark.parametrize("tokenizer", ["bytes", "basic_english", "bpe"])
def test_tokens_of_each_tokenizer(text: Path, tokenizer: str):
    extra = {"vocabulary": 270} if tokenizer == "bpe" else {}
    data = make(text, data={"tokenizer": tokenizer, **extra}).data
    read, again = read_tokens(data), read_tokens(data)
    assert read.valid is not None
    assert read.digest == again.digest
    assert int(read.train.max()) < read.tokenizer.size
    (text / "valid.txt").write_text("the mat sat on the cat. " * 20)
    assert read_tokens(data).digest != read.digest


def test_a_step_is_that_of_a_plain_loop(text: Path):
    """One of torch's own AdamW over one batch, written out."""
    config = make(text, optimizer={"warmup": 0, "schedule": "constant", "clip": 0.1})
    trainer, plain = trainer_of(config), trainer_of(config).model
    decayed = [p for p in plain.parameters() if p.ndim > 1]
    others = [p for p in plain.parameters() if p.ndim < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(3):
        batch = trainer.feed.at(step)
        loss = plain(input_ids=batch, labels=batch).loss  # shifts the labels itself
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        ours = trainer.backward(step)
        trainer.update()
        trainer.drop_gradients()
        assert float(ours) == pytest.approx(loss.item(), rel=1e-5)
    for one, two in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)


def test_pieces_make_the_same_step(text: Path, tmp_path: Path):
    for pieces in (1, 2, 4):
        config = make(text, training={"accumulate": pieces})
        begin(config, tmp_path / str(pieces))
    losses = [logged(tmp_path / str(pieces), "loss")[1] for pieces in (1, 2, 4)]
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-4)
    assert losses[0] != losses[1]  # in another order


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"hiden_size": 3}}, "model.hiden_size is no setting of gpt_neox"),
        ({"model": {"hidden_size": 15}}, r"\[model\] cannot be (used|built) \(.*hidden"),
        ({"model": {"vocab_size": 99}}, "model.vocab_size must be at least 256"),
        ({"model": {"max_position_embeddings": 9}}, "data.window must be at most 9"),
        ({"data": {"window": 10**6}}, "data.window must be below"),
        ({"data": {"corpus": "nowhere"}}, "nowhere"),
        ({"data": {"tokenizer": "nowhere"}}, "nowhere"),
        ({"training": {"precision": "bfloat16"}}, "bfloat16 is for a CUDA device, not cpu"),
    ],
)
def test_what_does_not_fit_is_said(text: Path, tmp_path: Path, sections: Any, words: str):
    config = make(text, **sections)
    with pytest.raises(ValueError, match=words):
        begin(config, tmp_path / "run")


def test_a_text_without_validation(text: Path, tmp_path: Path):
    (text / "valid.txt").unlink()
    with pytest.raises(ValueError, match=r"validation\.every must be 0"):
        begin(make(text), tmp_path / "run")
    result = begin(make(text, validation={"every": 0}), tmp_path / "other")
    assert np.isnan(result.validation_loss)
    assert np.isfinite(result.loss)
