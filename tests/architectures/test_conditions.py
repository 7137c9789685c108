"""Attention measured while models run as people run them: caches, checkpointing, towers, padding.

The reference is the model's own eager softmax, as in `test_architectures`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from joma.probes import watch_attention
from tests.architectures._comparison import Entropies, largest_difference, watched
from tests.architectures._models import BY_NAME, build, inputs_of
from tests.architectures._reference import Attention, attentions, mean_entropies, recording

TOLERANCE = 1e-5

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def _tokens(length: int, seed: int = 5, batch: int = 2) -> Tensor:
    return torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(seed))


def _mask(length: int, *real: int, left: bool = False) -> Tensor:
    """One row for each number of real tokens."""
    place = torch.arange(length)
    place = place.flip(0) if left else place
    return torch.stack([(place < number).long() for number in real])


def _agree(found: Entropies, expected: Mapping[str, Tensor]) -> None:
    assert found.means().keys() == expected.keys()
    assert largest_difference(found.means(), expected) < TOLERANCE


def _rows(seen: list[Attention], rows: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
    """Mean entropies with the real queries (B, T) chosen by module path."""
    means = {}
    for attention in seen:
        mask = rows(attention.module)
        real = {} if mask is None else {mask.shape[1]: mask.bool()}
        means[attention.key] = attention.rows(real).mean(0)
    return means


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "deepseek_v2", "gpt_oss", "bloom"])
@pytest.mark.parametrize("left", [False, True])
def test_generation_with_a_cache(name: str, left: bool):
    tokens = _tokens(10)
    given: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    given |= {"eos_token_id": None}
    if left:
        given["attention_mask"] = mask = _mask(10, 10, 7, left=True)
        tokens = tokens * mask
    model, eager = build(BY_NAME[name]), build(BY_NAME[name], attention="eager")
    found = Entropies()
    plain = model.generate(tokens, **given)
    with watch_attention(model, found):
        assert torch.equal(model.generate(tokens, **given), plain)
    with torch.no_grad(), recording(eager) as seen:
        assert torch.equal(eager.generate(tokens, **given), plain)
    real = {10: given["attention_mask"].bool()} if left else {}
    _agree(found, mean_entropies(seen, real))


def test_generation_of_an_encoder_and_decoder():
    architecture = BY_NAME["bart"]
    inputs = {"input_ids": _tokens(10), "attention_mask": _mask(10, 10, 7)}
    given: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "num_beams": 2}
    model, eager = build(architecture), build(architecture, attention="eager")
    found = Entropies()
    with watch_attention(model, found):
        text = model.generate(**inputs, **given)
    with torch.no_grad(), recording(eager) as seen:
        assert torch.equal(eager.generate(**inputs, **given), text)
    # Beams are real queries, the encoder's padding is not.
    _agree(found, mean_entropies(seen, {10: inputs["attention_mask"].bool()}))


def test_a_cache_given_by_hand_with_padding():
    model, eager = build(BY_NAME["llama"]), build(BY_NAME["llama"], attention="eager")
    tokens, mask = _tokens(12), _mask(12, 12, 8)

    def read(model: nn.Module) -> None:
        first = model(tokens[:, :5], attention_mask=mask[:, :5], use_cache=True)
        model(tokens[:, 5:], attention_mask=mask, past_key_values=first.past_key_values)

    found = Entropies()
    with torch.no_grad(), watch_attention(model, found):
        read(model)
    with torch.no_grad(), recording(eager) as seen:
        read(eager)
    _agree(found, mean_entropies(seen, {5: mask[:, :5].bool(), 7: mask[:, 5:].bool()}))


class _Wrapped(nn.Module):
    """A model in another that calls it twice, for a question and for an answer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, question: Tensor, answer: Tensor) -> Tensor:
        return self.inner(question)[0].sum() + self.inner(answer)[0].sum()


def test_a_model_inside_a_module_that_calls_it_twice():
    question, answer = _tokens(9), _tokens(14, seed=6)
    model = _Wrapped(build(BY_NAME["bert"]))
    eager = _Wrapped(build(BY_NAME["bert"], attention="eager"))
    inputs = {"question": question, "answer": answer}
    found, _ = watched(model, inputs)
    expected = mean_entropies(attentions(eager, inputs))
    assert set(expected) == {
        f"inner.bert.encoder.layer.{layer}.attention.self{again}"
        for layer in (0, 1)
        for again in ("", "#1")
    }
    _agree(found, expected)
    found, _ = watched(model, inputs)  # numbers of passes begin anew
    _agree(found, expected)


def test_cross_attention_when_both_sides_are_as_long():
    source, target = _mask(11, 11, 4), _mask(11, 6, 9)
    inputs = {
        "input_ids": _tokens(11),
        "attention_mask": source,
        "decoder_input_ids": _tokens(11, seed=6),
        "decoder_attention_mask": target,
    }
    for name in ("bart", "t5"):
        found, _ = watched(build(BY_NAME[name]), inputs)
        seen = attentions(build(BY_NAME[name], attention="eager"), inputs)
        _agree(found, _rows(seen, lambda path: target if "decoder" in path else source))


def test_a_padded_source_alone():
    source = _mask(11, 11, 4)
    inputs = {
        "input_ids": _tokens(11),
        "attention_mask": source,
        "decoder_input_ids": _tokens(11, seed=6),
    }
    for name in ("bart", "t5", "marian"):
        found, _ = watched(build(BY_NAME[name]), inputs)
        seen = attentions(build(BY_NAME[name], attention="eager"), inputs)
        _agree(found, _rows(seen, lambda path: None if "decoder" in path else source))


def test_padding_of_a_text_is_not_that_of_an_image():
    mask = _mask(10, 10, 6)  # an image has 9 patches and a class token
    inputs = inputs_of(BY_NAME["clip"]) | {"input_ids": _tokens(10), "attention_mask": mask}
    found, _ = watched(build(BY_NAME["clip"]), inputs)
    seen = attentions(build(BY_NAME["clip"], attention="eager"), inputs)
    _agree(found, _rows(seen, lambda path: mask if "text" in path else None))


def test_a_hole_in_the_mask():
    mask = _mask(12, 12, 12)
    mask[1, 4:6] = 0
    inputs = {"input_ids": _tokens(12), "attention_mask": mask}
    for name in ("llama", "bert", "gpt_neox"):
        found, _ = watched(build(BY_NAME[name]), inputs)
        seen = attentions(build(BY_NAME[name], attention="eager"), inputs)
        _agree(found, mean_entropies(seen, {12: mask.bool()}))


def test_sequences_packed_by_positions():
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    inputs = {"input_ids": _tokens(12, batch=1), "position_ids": positions, "use_cache": False}
    for name in ("llama", "mistral"):
        found, _ = watched(build(BY_NAME[name]), inputs)
        seen = attentions(build(BY_NAME[name], attention="eager"), inputs)
        _agree(found, mean_entropies(seen))
        first = seen[0].probabilities[0, :, 5:, :5]
        assert float(first.max()) == 0, "the second text must not see the first"


def test_sound_of_different_lengths():
    architecture = BY_NAME["wav2vec2"]
    mask = _mask(300, 300, 180)
    inputs = inputs_of(architecture) | {"attention_mask": mask}
    model, eager = build(architecture), build(architecture, attention="eager")
    found, _ = watched(model, inputs)
    frames: Any = eager.wav2vec2
    real = frames._get_feature_vector_attention_mask(18, mask).bool()
    assert 0 < int((~real).sum()) < 18
    _agree(found, mean_entropies(attentions(eager, inputs), {18: real}))
