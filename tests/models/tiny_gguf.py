"""A GGUF file of the tiny Llama, as llama.cpp would have written it."""

from pathlib import Path

import gguf
import numpy as np

from joma.common.quiet import quietly
from tests.models.tiny import CONTEXT, HEADS, HIDDEN, LAYERS, VOCABULARY, WIDTH, tiny

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


def write_gguf(path: Path, **entries: int | bool) -> Path:
    """Writes the file; `entries` are entries of its tokenizer, such as add_bos_token."""
    model = tiny("llama")
    writer = gguf.GGUFWriter(path, "llama")
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
    for name, value in entries.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        else:
            writer.add_uint32(f"tokenizer.ggml.{name}", value)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = _pairs(values, HEADS if "q_proj" in name else KEYS)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
