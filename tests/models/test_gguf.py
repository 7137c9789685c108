import numpy as np
import pytest
import torch

from joma.models import load
from joma.models._quiet import quietly
from tests.models.tiny import CONTEXT, HEADS, HIDDEN, LAYERS, VOCABULARY, WIDTH, tiny, tokens

gguf = pytest.importorskip("gguf", reason="GGUF files are read by the gguf package")

with quietly():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

KEYS = 2
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def _gguf_name(name):
    if name in WHOLE:
        return WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def _pairs(matrix, heads):
    """llama.cpp keeps rotary pairs side by side where transformers keeps halves."""
    return matrix.reshape(heads, 2, -1, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


@pytest.fixture
def path(tmp_path):
    model = tiny("llama")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    letters = [bytes_to_unicode()[byte] for byte in range(97, 123)]
    words = ["<unk>", "<s>", "</s>", *letters, "ab"]
    words += [f"<{index}>" for index in range(VOCABULARY - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([1] * len(words))
    writer.add_token_merges(["a b"])
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = _pairs(values, HEADS if "q_proj" in name else KEYS)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf"


def test_a_gguf_file_is_the_model_it_was_made_of(path, capfd):
    loaded = load(path)
    assert capfd.readouterr() == ("", "")
    with torch.no_grad():
        expected = tiny("llama")(tokens()).logits
        torch.testing.assert_close(loaded.model(tokens()).logits, expected, rtol=0, atol=1e-5)
    assert loaded.architecture.name == "Llama"
    assert loaded.context == CONTEXT
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.encode("abba")) == "abba"
    assert loaded.encode("abba")[-3:] == [29, 4, 3]


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.99])
def test_a_gguf_file_cut_short_is_named(path, share):
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ValueError, match=r"model\.gguf") as refused:
        load(path)
    assert "\n" not in str(refused.value)
