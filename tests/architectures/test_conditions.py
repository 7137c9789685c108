"""Attention measured while models run as people run them: caches, towers, padding, shared modules.

The reference is the model's own eager softmax, as in `test_architectures`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.probes import watch_attention
from tests.architectures._comparison import Entropies, largest_difference, tensors
from tests.architectures._models import BY_NAME, build, initialise, inputs_of
from tests.architectures._reference import Attention, mean_entropies, recording

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Make = Callable[[str | None], Any]
"""From an implementation of attention, None for the library's choice, to a model."""


def _tokens(length: int, seed: int = 5, batch: int = 2) -> Tensor:
    return torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(seed))


def _mask(length: int, *real: int) -> Tensor:
    """One row for each number of real tokens, which come first."""
    return torch.stack([(torch.arange(length) < number).long() for number in real])


def _agree(
    make: Make,
    call: Callable[[Any], Any],
    real: Mapping[int, Tensor] | Callable[[str], Tensor | None] | None = None,
) -> list[Attention]:
    """Compare a watched model with its eager twin; `real` has masks by length or by module path."""
    model, eager = make(None), make("eager")
    with torch.no_grad():
        plain = tensors(call(model))
    once, found = Entropies(), Entropies()
    for collected in (once, found):  # numbers of passes begin anew
        with torch.no_grad(), watch_attention(model, collected):
            assert all(map(torch.equal, tensors(call(model)), plain))
    with torch.no_grad(), recording(eager) as seen:
        call(eager)
    if callable(real):
        rows = {}
        for attention in seen:
            mask = real(attention.module)
            own = {} if mask is None else {mask.shape[1]: mask.bool()}
            rows[attention.key] = attention.rows(own).mean(0)
    else:
        rows = mean_entropies(seen, {length: it.bool() for length, it in (real or {}).items()})
    assert found.means().keys() == rows.keys()
    assert largest_difference(found.means(), rows) < 1e-5
    return seen


def _built(name: str) -> Make:
    return lambda attention: build(name, attention=attention)


CACHED = ["llama", "mistral", "gemma2", "deepseek_v2", "gpt_oss", "bloom"]
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.mark.parametrize(
    ("name", "cache"),
    [*((name, "dynamic") for name in CACHED), ("llama", "static"), ("gemma3_text", "static")],
)
def test_generation_with_a_cache_and_padding_on_the_left(name: str, cache: str):
    mask = _mask(10, 10, 7).flip(1)
    given = {**GREEDY, "attention_mask": mask, "max_new_tokens": 4}
    given |= {"cache_implementation": cache} if cache == "static" else {}
    _agree(_built(name), lambda model: model.generate(_tokens(10) * mask, **given), {10: mask})


def test_generation_of_an_encoder_and_decoder():
    mask = _mask(10, 10, 7)
    given: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "num_beams": 2}

    def call(model: Any) -> Tensor:
        return model.generate(_tokens(10), attention_mask=mask, **given)

    _agree(_built("bart"), call, {10: mask})  # beams are real queries, the encoder's padding is not


def test_a_cache_given_by_hand_with_padding():
    tokens, mask = _tokens(12), _mask(12, 12, 8)

    def call(model: Any) -> Tensor:
        first = model(tokens[:, :5], attention_mask=mask[:, :5], use_cache=True)
        return model(
            tokens[:, 5:], attention_mask=mask, past_key_values=first.past_key_values
        ).logits

    _agree(_built("llama"), call, {5: mask[:, :5], 7: mask[:, 5:]})


class _Wrapped(nn.Module):
    """A model in another that calls it twice, for a question and for an answer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, question: Tensor, answer: Tensor) -> Tensor:
        return self.inner(question)[0].sum() + self.inner(answer)[0].sum()


def test_a_model_inside_a_module_that_calls_it_twice():
    seen = _agree(
        lambda attention: _Wrapped(build("bert", attention=attention)),
        lambda model: model(_tokens(9), _tokens(14, seed=6)),
    )
    path = "inner.bert.encoder.layer.{}.attention.self{}"
    assert {it.key for it in seen} == {path.format(*it) for it in ((0, ""), (1, ""))} | {
        path.format(*it) for it in ((0, "#1"), (1, "#1"))
    }


@pytest.mark.parametrize("padded_target", [False, True])
@pytest.mark.parametrize("name", ["bart", "t5", "marian"])
def test_both_sides_of_cross_attention_as_long(name: str, padded_target: bool):
    source, target = _mask(11, 11, 4), _mask(11, 6, 9) if padded_target else None
    inputs = {"attention_mask": source, "decoder_input_ids": _tokens(11, seed=6)}
    inputs |= {} if target is None else {"decoder_attention_mask": target}
    _agree(
        _built(name),
        lambda model: model(_tokens(11), **inputs).logits,
        lambda path: target if "decoder" in path else source,
    )


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_that_ran_before(name: str):
    mask = _mask(11, 11, 5)

    def call(model: Any) -> Tensor:
        before = model.get_encoder()(input_ids=_tokens(11), attention_mask=mask)
        return model(
            encoder_outputs=before, attention_mask=mask, decoder_input_ids=_tokens(9)
        ).logits

    _agree(_built(name), call, {11: mask})


def test_two_models_made_into_an_encoder_and_a_decoder():
    from transformers import AutoConfig, EncoderDecoderConfig, EncoderDecoderModel

    def make(attention: str | None) -> Any:
        own = BY_NAME["bert"].config
        decoder = AutoConfig.for_model("bert", **own, is_decoder=True, add_cross_attention=True)
        encoder = AutoConfig.for_model("bert", **own)
        both = EncoderDecoderConfig(encoder=encoder.to_dict(), decoder=decoder.to_dict())
        with torch.random.fork_rng():
            model: Any = EncoderDecoderModel(both)
        if attention is not None:
            model.set_attn_implementation(attention)
        initialise(model, 3)
        return model.eval()

    source, target = _mask(11, 11, 5), _mask(16, 16, 9)
    inputs = {"input_ids": _tokens(11), "attention_mask": source}
    inputs |= {"decoder_input_ids": _tokens(16), "decoder_attention_mask": target}
    _agree(make, lambda model: model(**inputs).logits, {16: target, 11: source})


def test_layers_that_share_their_attention():
    def make(attention: str | None) -> Any:
        model = build("llama", attention=attention)
        model.model.layers[1].self_attn = model.model.layers[0].self_attn
        return model

    mask = _mask(16, 16, 9)
    given = {"attention_mask": mask, "use_cache": False}
    _agree(make, lambda model: model(_tokens(16), **given).logits, {16: mask})


def test_padding_of_a_text_is_not_that_of_an_image():
    mask = _mask(10, 10, 6)  # an image has 9 patches and a class token
    inputs = inputs_of(BY_NAME["clip"]) | {"input_ids": _tokens(10), "attention_mask": mask}
    _agree(
        _built("clip"),
        lambda model: model(**inputs).logits_per_text,
        lambda path: mask if "text" in path else None,
    )


@pytest.mark.parametrize("name", ["llama", "bert", "gpt_neox"])
def test_a_hole_in_the_mask(name: str):
    mask = _mask(12, 12, 12)
    mask[1, 4:6] = 0
    _agree(_built(name), lambda model: model(_tokens(12), attention_mask=mask).logits, {12: mask})


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_sequences_packed_by_positions(name: str):
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    given = {"position_ids": positions, "use_cache": False}
    tokens = _tokens(12, batch=1)
    seen = _agree(_built(name), lambda model: model(tokens, **given).logits)
    first = seen[0].probabilities[0, :, 5:, :5]
    assert float(first.max()) == 0, "the second text must not see the first"


def test_sound_of_different_lengths():
    mask = _mask(300, 300, 180)
    inputs = inputs_of(BY_NAME["wav2vec2"]) | {"attention_mask": mask}
    frames: Any = build("wav2vec2").wav2vec2
    real = frames._get_feature_vector_attention_mask(18, mask).bool()
    assert 0 < int((~real).sum()) < 18
    _agree(_built("wav2vec2"), lambda model: model(**inputs).logits, {18: real})


def test_attention_over_blocks_is_refused():
    blocks = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}
    model = build(replace(BY_NAME["big_bird"], own={**blocks, "max_position_embeddings": 256}))
    watching = partial(watch_attention, model, lambda call: None)
    with torch.no_grad(), pytest.raises(JomaError, match="BigBird"), watching():
        model(_tokens(96))
