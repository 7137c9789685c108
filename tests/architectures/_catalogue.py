"""Ninety-six architectures: a tiny configuration of each, and what is expected of it.

A configuration is the library's default with every size that is named in `TINY` replaced, and with
what an architecture sets on top (`OWN`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

VOCABULARY = 99
_MIXED = ["sliding_attention", "full_attention"]

_SIZES = {
    99: "vocab_size",
    64: "max_position_embeddings n_positions max_seq_len",
    48: """intermediate_size ffn_dim d_ff dff d_inner hidden_dim encoder_ffn_dim decoder_ffn_dim
        intermediate_size_mlp""",
    32: "hidden_size d_model n_embd dim mamba_d_ssm",
    24: "moe_intermediate_size shared_expert_intermediate_size",
    16: "embedding_size q_lora_rank",
    12: "head_dim d_kv kv_lora_rank",  # more than heads' share of the width
    10: "v_head_dim",
    8: "mamba_d_state mamba_chunk_size mamba_d_head state_size qk_nope_head_dim block_multiple_of",
    6: "sliding_window local_attention attention_chunk_size",
    4: """num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads
        mamba_n_heads num_experts num_local_experts n_routed_experts rotary_dim qk_rope_head_dim
        mamba_dt_rank""",
    3: "num_decoder_layers mask_token_id",
    2: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
        num_key_value_heads decoder_attention_heads num_experts_per_tok
        eos_token_id sep_token_id""",
    1: """n_shared_experts first_k_dense_replace n_group topk_group bos_token_id cls_token_id
        decoder_start_token_id""",
    0: "pad_token_id",
}
TINY = {name: size for size, names in _SIZES.items() for name in names.split()}
TINY["query_pre_attn_scalar"] = 9


@dataclass(frozen=True)
class Architecture:
    """One model type.

    Attributes:
        model_type: As `AutoConfig.for_model` takes it.
        own: What its tiny configuration sets other than `TINY`.
        auto: The auto class that builds it, after "AutoModel".
        inputs: Which inputs it takes: see `_models.inputs_of`.
        refused: "" where attention is measured, else a word of the refusal.
        fast: Whether the fast half of the tests has it.
        pads: Whether its inputs can be padded.
    """

    model_type: str
    own: Mapping[str, Any] = field(default_factory=dict)
    auto: str = "ForCausalLM"
    inputs: str = "text"
    refused: str = ""
    fast: bool = False
    pads: bool = True

    @cached_property
    def config(self) -> dict[str, Any]:
        """Arguments of its configuration."""
        return _tiny(self.model_type, self.own)


def _tiny(model_type: str, own: Mapping[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type).to_dict()
    made: dict[str, Any] = {
        name: size for name, size in TINY.items() if default.get(name) is not None
    }
    for name in ("layer_types", "no_rope_layers"):  # two layers, of two kinds where there are two
        if default.get(name):
            made[name] = (list(dict.fromkeys(default[name])) * 2)[:2]
    for name, value in own.items():
        if name.endswith("_config"):
            kind = value.get("model_type") or default[name]["model_type"]
            value = _tiny(kind, value) | {"model_type": kind}
        made[name] = value
    return made


_IMAGE = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3}
_IMAGE |= {"num_attention_heads": 3, "image_size": 24, "patch_size": 8}
_BOTH_WAYS = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}

OWN: dict[str, dict[str, Any]] = {
    "gpt_neox": {"rotary_pct": 0.5},
    "opt": {"word_embed_proj_dim": 32},
    "phi": {"partial_rotary_factor": 0.5, "num_key_value_heads": 4},
    "olmo": {"num_key_value_heads": 4},
    "stablelm": {"qk_layernorm": True},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "llama": {"head_dim": 8},
    "phi3": {"sliding_window": 6},
    "starcoder2": {"sliding_window": 6},
    "phimoe": {"sliding_window": 6},
    "ministral": {"head_dim": 12},
    "qwen3_moe": {"head_dim": 12},
    "nemotron": {"num_key_value_heads": 2},
    "helium": {"head_dim": 8},
    "cohere": {"use_qk_norm": True},
    "granite": {"attention_multiplier": 0.5},
    # Other implementations do not cap in all versions of transformers.
    "gemma2": {"attn_logit_softcapping": 2.0, "attn_implementation": "eager"},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "layer_types": _MIXED * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    "llama4_text": {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "head_dim": 4,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 4},
    "qwen3_next": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "jamba": {
        "use_mamba_kernels": False,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": {"head_dim": 12, "mamba_n_groups": 1},
    "recurrent_gemma": {
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "head_dim": 8,
        "lru_width": 32,
        "attention_window_size": 6,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48},
    "mpt": {"expansion_ratio": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "albert": {"num_hidden_layers": 3},
    "esm": {
        "vocab_size": VOCABULARY,
        "pad_token_id": 0,
        "position_embedding_type": "rotary",
        "token_dropout": False,
    },
    "t5": {"num_decoder_layers": 3, "decoder_start_token_id": 0},
    "mt5": {"num_decoder_layers": 3, "feed_forward_proj": "gated-gelu"},
    "whisper": {"num_mel_bins": 8, "max_source_positions": 15, "max_target_positions": 64},
    "clip": {"text_config": {}, "vision_config": _IMAGE, "projection_dim": 16},
    "siglip": {"text_config": {"projection_size": 24}, "vision_config": _IMAGE},
    "llava": {
        "text_config": {"model_type": "llama", "head_dim": 8},
        "vision_config": {"model_type": "clip_vision_model", **_IMAGE},
        "image_token_index": 90,
        "vision_feature_layer": -1,
        "image_seq_length": 9,
    },
    "qwen2_vl": {
        "text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        "vision_config": {
            "depth": 2,
            "embed_dim": 24,
            "num_heads": 3,
            "hidden_size": 32,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
        },
        "image_token_id": 90,
        "video_token_id": 91,
        "vision_start_token_id": 92,
        "vision_end_token_id": 93,
    },
    "vit": _IMAGE,
    "dinov2": {**_IMAGE, "mlp_ratio": 2},
    "wav2vec2": {
        "conv_dim": [16, 16],
        "conv_kernel": [6, 4],
        "conv_stride": [4, 4],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "mask_time_prob": 0.0,
        "layerdrop": 0.0,
    },
    "deberta": _BOTH_WAYS,
    "deberta-v2": _BOTH_WAYS,
    "roformer": {"embedding_size": 32},
    "big_bird": {"attention_type": "original_full"},
    "longformer": {"attention_window": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "rwkv": {"attention_hidden_size": 32},
}
"""By model type; of those that are not here `TINY` says all."""

# Those with an asterisk are the fast half.
_DECODERS = """
gpt2* gpt_neox* opt* phi* olmo stablelm persimmon* biogpt ctrl* gpt_bigcode*
llama* mistral* smollm3 qwen2* qwen3* phi3* olmo2* olmo3 cohere cohere2 granite* starcoder2 glm*
glm4 ministral nemotron helium exaone4 seed_oss arcee* apertus bitnet diffllama* ernie4_5
gemma* gemma2* gemma3_text* gemma3n_text
mixtral* qwen2_moe* qwen3_moe phimoe granitemoe llama4_text* deepseek_v2* deepseek_v3 gpt_oss*
qwen3_next jamba* lfm2 falcon_h1 recurrent_gemma
bloom* falcon* mpt* gptj* gpt_neo* codegen* xglm openai-gpt xlnet*
mamba* mamba2 rwkv
"""
_ENCODERS = """
bert* roberta* xlm-roberta camembert ernie electra distilbert* albert* esm nomic_bert eurobert
modernbert* deberta* deberta-v2 mpnet roformer big_bird longformer*
"""
_TRANSLATORS = "t5* mt5 bart* pegasus marian m2m_100"
_REFUSED = ("longformer", "mamba", "mamba2", "rwkv")
_GROUPS = [
    ("ForCausalLM", "text", _DECODERS),
    ("ForMaskedLM", "text", _ENCODERS),
    ("ForSeq2SeqLM", "seq2seq", _TRANSLATORS),
    ("ForSpeechSeq2Seq", "speech", "whisper*"),
    ("", "image and text", "clip* siglip"),
    ("ForImageTextToText", "patches in text", "llava"),
    ("ForImageTextToText", "image in text", "qwen2_vl"),
    ("ForImageClassification", "image", "vit* dinov2"),
    ("ForCTC", "sound", "wav2vec2*"),
]
_UNPADDED = {"speech", "image in text", "image", "sound"}

ARCHITECTURES = [
    Architecture(
        name := entry.rstrip("*"),
        OWN.get(name, {}),
        auto,
        inputs,
        refused=name if name in _REFUSED else "",
        fast=entry.endswith("*"),
        pads=inputs not in _UNPADDED and name != "openai-gpt",
    )
    for auto, inputs, names in _GROUPS
    for entry in names.split()
]
