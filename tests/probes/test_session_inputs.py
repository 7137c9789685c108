"""`probe` on inputs that are given by name: encoders with decoders, images, sound, padding."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from joma.errors import JomaError
from joma.probes import probe
from tests.architectures._models import BY_NAME, build
from tests.probes._sharp import sharpen

TOKENS = torch.randint(2, 40, (2, 9), generator=torch.Generator().manual_seed(3))
MASK = torch.ones(2, 9, dtype=torch.long)
MASK[0, 6:] = 0
PIXELS = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(4))
FRAMES = torch.randn(2, 8, 30, generator=torch.Generator().manual_seed(5))
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
ATTENTION = ("attention_entropy", "attention_first")


def test_images_and_sound_as_several_passes():
    vit = sharpen(hf.ViTModel(hf.ViTConfig(image_size=8, patch_size=4, **TOWER)))
    one = probe(vit, inputs={"pixel_values": PIXELS}, metrics=ATTENTION)
    both = probe(
        vit, [{"pixel_values": PIXELS[:1]}, {"pixel_values": PIXELS[1:]}], metrics=ATTENTION
    )
    assert {it.kind for it in one} == {"self"}
    assert len(one) == len(both) == 2 * 2 * 3
    assert [it.value for it in one] == pytest.approx([it.value for it in both], abs=1e-6)
    speech = {"input_features": FRAMES, "decoder_input_ids": TOKENS[:, :5]}
    kinds = {it.kind for it in probe(build(BY_NAME["whisper"]), inputs=speech, metrics=ATTENTION)}
    assert kinds == {"encoder self", "decoder self", "decoder cross"}


@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_tokens_count_nowhere(side: str):
    """What is measured of a padded batch is what is measured of its sequences alone."""
    sizes: dict[str, Any] = TOWER | {"vocab_size": 40, "max_position_embeddings": 16}
    model = sharpen(hf.BertModel(hf.BertConfig(**sizes)))
    mask = MASK if side == "right" else MASK.flip(1)
    real = mask[0].bool()
    alone = [
        {"input_ids": TOKENS[:1, real], "position_ids": torch.arange(9)[None, real]},
        {"input_ids": TOKENS[1:], "position_ids": torch.arange(9)[None]},
    ]
    metrics = (*ATTENTION, "mlp_kurtosis", "mlp_inactive")
    padded = probe(model, inputs={"input_ids": TOKENS, "attention_mask": mask}, metrics=metrics)
    apart = probe(model, inputs=alone, metrics=metrics)
    found, expected = ({(i.metric, i.module, i.head): i.value for i in x} for x in (padded, apart))
    if side == "left":  # the first key of a padded row is another one
        found, expected = (
            {key: value for key, value in x.items() if key[0] != "attention_first"}
            for x in (found, expected)
        )
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_module_of_ones_own_with_inputs():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, image: Tensor) -> Tensor:
            return self.attend(image, image, image)[0]

    found = probe(Own(), inputs={"image": torch.randn(2, 5, 8)}, metrics=ATTENTION)
    assert {(it.module, it.kind) for it in found} == {("attend", "self")}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "got neither"),
        ({"windows": TOKENS, "inputs": {"input_ids": TOKENS}}, "got both"),
        ({"inputs": []}, "inputs must be keyword arguments"),
        ({"inputs": TOKENS}, "inputs must be keyword arguments"),
    ],
)
def test_bad_inputs(given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        probe(build(BY_NAME["bart"]), **given, metrics=ATTENTION)


def test_an_encoder_and_its_decoder_read_a_text():
    config = hf.T5Config(vocab_size=99, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4)
    config.decoder_start_token_id = 7
    model = sharpen(hf.T5ForConditionalGeneration(config)).eval()
    tokens = torch.randint(99, (3, 11), generator=torch.Generator().manual_seed(0))
    shifted = torch.cat([torch.full((3, 1), 7), tokens[:, :-1]], 1)
    given = {"input_ids": tokens, "decoder_input_ids": shifted}
    read = probe(model, tokens, metrics=ATTENTION)
    assert {it.kind for it in read} == {"encoder self", "decoder self", "decoder cross"}
    assert read == probe(model, inputs=given, metrics=ATTENTION)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: hf.ViTModel(hf.ViTConfig(image_size=8, patch_size=4, **TOWER)), "reads no tokens"),
        (
            lambda: hf.CLIPModel(hf.CLIPConfig(text_config=TOWER, vision_config=TOWER)),
            "on a text alone",
        ),
    ],
    ids=["vit", "clip"],
)
def test_a_model_that_cannot_read_a_text_alone_says_so(model, why):
    with pytest.raises(JomaError, match=f"{why}.*inputs="):
        probe(model(), torch.zeros(2, 5, dtype=torch.long), metrics=ATTENTION)


def test_a_decoder_that_reads_as_many_tokens_has_no_overlap_by_the_encoders():
    config = hf.T5Config(vocab_size=99, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4)
    model = sharpen(hf.T5Model(config)).eval()
    tokens = torch.randint(99, (3, 11), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": tokens, "decoder_input_ids": torch.zeros_like(tokens)}
    found = probe(model, inputs=given, metrics=("residual_overlap",))
    assert [it.module for it in found] == ["encoder.block.0"]
