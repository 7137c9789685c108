"""Attention of models inside other modules, and of models that get their inputs in odd ways."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from joma.errors import JomaError
from joma.probes import watch_attention
from tests.architectures._comparison import Entropies, largest_difference
from tests.architectures._models import BY_NAME, build, initialise
from tests.architectures._reference import mean_entropies, recording

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

_DRAW = torch.Generator().manual_seed(5)
TOKENS = torch.randint(3, 90, (2, 16), generator=_DRAW)
SOURCE = torch.randint(3, 90, (2, 11), generator=_DRAW)
MASK = (torch.arange(16) < torch.tensor([[16], [9]])).long()
SOURCE_MASK = (torch.arange(11) < torch.tensor([[11], [5]])).long()
REAL = {16: MASK.bool(), 11: SOURCE_MASK.bool()}


def _agree(
    make: Callable[[str | None], Any],
    call: Callable[[Any], object],
    real: dict[int, Tensor] | None = None,
) -> None:
    """Compares a model with its eager twin while `call` runs them."""
    model, eager = make(None), make("eager")
    found = Entropies()
    with torch.no_grad(), watch_attention(model, found):
        call(model)
    with torch.no_grad(), recording(eager) as seen:
        call(eager)
    expected = mean_entropies(seen, REAL if real is None else real)
    assert found.means().keys() == expected.keys()
    assert largest_difference(found.means(), expected) < 1e-5


def _named(name: str) -> Callable[[str | None], Any]:
    return lambda attention: build(BY_NAME[name], attention=attention)


def _shared(attention: str | None) -> Any:
    model = build(BY_NAME["llama"], attention=attention)
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    return model


def test_layers_that_share_their_attention():
    _agree(_shared, lambda model: model(TOKENS, attention_mask=MASK, use_cache=False))


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_that_ran_before(name: str):
    def call(model: Any) -> None:
        before = model.get_encoder()(input_ids=SOURCE, attention_mask=SOURCE_MASK)
        model(encoder_outputs=before, attention_mask=SOURCE_MASK, decoder_input_ids=TOKENS[:, :9])

    _agree(_named(name), call)


def test_two_models_made_into_an_encoder_and_a_decoder():
    from transformers import AutoConfig, EncoderDecoderConfig, EncoderDecoderModel

    def make(attention: str | None) -> Any:
        own = dict(BY_NAME["bert"].config)
        decoder = AutoConfig.for_model("bert", **own, is_decoder=True, add_cross_attention=True)
        both = EncoderDecoderConfig(
            encoder=AutoConfig.for_model("bert", **own).to_dict(), decoder=decoder.to_dict()
        )
        torch.manual_seed(0)
        model: Any = EncoderDecoderModel(both)
        if attention is not None:
            model.set_attn_implementation(attention)
        initialise(model, 3)
        return model.eval()

    inputs = {"input_ids": SOURCE, "attention_mask": SOURCE_MASK}
    target = {"decoder_input_ids": TOKENS, "decoder_attention_mask": MASK}
    _agree(make, lambda model: model(**inputs, **target))


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_generation_with_a_cache_of_fixed_size(name: str):
    mask = MASK.flip(1)
    given: dict[str, Any] = {"cache_implementation": "static", "max_new_tokens": 3}
    given |= {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    _agree(
        _named(name),
        lambda model: model.generate(TOKENS * mask, attention_mask=mask, **given),
        {16: mask.bool()},
    )


def test_attention_over_blocks_is_refused():
    from dataclasses import replace

    blocks = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}
    config = {**BY_NAME["big_bird"].config, **blocks, "max_position_embeddings": 256}
    model = build(replace(BY_NAME["big_bird"], config=config))
    with (
        torch.no_grad(),
        pytest.raises(JomaError, match="BigBird"),
        watch_attention(model, lambda call: None),
    ):
        model(TOKENS.repeat(1, 6))
