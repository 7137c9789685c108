"""Ninety-six architectures: a tiny configuration of each, and what is expected of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 99


@dataclass(frozen=True)
class Architecture:
    """One model type.

    Attributes:
        model_type: as `AutoConfig.for_model` takes it.
        config: arguments of its configuration.
        build: name of the auto class.
        inputs: which inputs it takes: see `_models.inputs_of`.
        refused: "" where attention is measured, else a word of the refusal.
        fast: whether the fast half of the tests has it.
        pads: whether its inputs can be padded.
    """

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    build: str = "AutoModelForCausalLM"
    inputs: str = "text"
    refused: str = ""
    fast: bool = False
    pads: bool = True

    def __str__(self) -> str:
        return self.model_type


_LM = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _LM | {"num_key_value_heads": 2}
_HEADED = _GROUPED | {"head_dim": 12}  # heads that do not make up the hidden size
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
_VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 24,
    "patch_size": 8,
}
_TOWER = {key: value for key, value in _LM.items() if key != "pad_token_id"}
_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_MASKED = "AutoModelForMaskedLM"
_TRANSLATION = "AutoModelForSeq2SeqLM"
_MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}


def _lm(model_type: str, config: Mapping[str, Any] = _LM, **more: Any) -> Architecture:
    own = {key: more.pop(key) for key in ("refused", "fast", "pads") if key in more}
    return Architecture(model_type, {**config, **more}, **own)


def _encoder(model_type: str, config: Mapping[str, Any] = _ENCODER, **more: Any) -> Architecture:
    own = {key: more.pop(key) for key in ("refused", "fast") if key in more}
    return Architecture(model_type, {**config, **more}, build=_MASKED, **own)


def _seq2seq(model_type: str, config: Mapping[str, Any] = _SEQ2SEQ, **more: Any) -> Architecture:
    fast = more.pop("fast", False)
    return Architecture(
        model_type, {**config, **more}, build=_TRANSLATION, inputs="seq2seq", fast=fast
    )


ARCHITECTURES = [
    # Decoders, one head of keys per head of queries.
    _lm("gpt2", _GPT2, fast=True),
    _lm("gpt_neox", rotary_pct=0.5, fast=True),
    _lm("opt", ffn_dim=48, word_embed_proj_dim=32, fast=True),
    _lm("phi", partial_rotary_factor=0.5, fast=True),
    _lm("olmo"),
    _lm("stablelm", _GROUPED, qk_layernorm=True),
    _lm("persimmon", fast=True),
    _lm("biogpt"),
    _lm(
        "ctrl",
        {key: value for key, value in _GPT2.items() if "token" not in key},
        dff=48,
        fast=True,
    ),
    _lm("gpt_bigcode", _GPT2, fast=True),
    # Decoders with grouped heads.
    _lm("llama", _GROUPED, fast=True),
    _lm("mistral", _HEADED, sliding_window=6, fast=True),
    _lm("smollm3", _GROUPED, no_rope_layers=[1, 0]),
    _lm("qwen2", _GROUPED, fast=True),
    _lm("qwen3", _HEADED, fast=True),
    _lm("phi3", _GROUPED, sliding_window=6, fast=True),
    _lm("olmo2", _GROUPED, fast=True),
    _lm(
        "olmo3",
        _GROUPED,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
    _lm("cohere", _GROUPED, use_qk_norm=True),
    _lm(
        "cohere2",
        _HEADED,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
    _lm("granite", _GROUPED, attention_multiplier=0.5, fast=True),
    _lm("starcoder2", _GROUPED, sliding_window=6),
    _lm("glm", _HEADED, fast=True),
    _lm("glm4", _HEADED),
    _lm("ministral", _HEADED, sliding_window=6),
    _lm("nemotron", _GROUPED),
    _lm("helium", _GROUPED, head_dim=8),
    _lm(
        "exaone4",
        _GROUPED,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
    _lm("seed_oss", _HEADED),
    _lm("arcee", _GROUPED, fast=True),
    _lm("apertus", _GROUPED),
    _lm("bitnet", _GROUPED),
    _lm("diffllama", _GROUPED, fast=True),
    _lm("ernie4_5", _HEADED),
    _lm("gemma", _HEADED, fast=True),
    _lm(
        "gemma2",
        _HEADED,
        query_pre_attn_scalar=9,
        attn_logit_softcapping=2.0,
        attn_implementation="eager",  # the others do not cap in all versions of transformers
        sliding_window=6,
        fast=True,
    ),
    _lm(
        "gemma3_text",
        _HEADED,
        query_pre_attn_scalar=9,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        fast=True,
    ),
    _lm(
        "gemma3n_text",
        _HEADED,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        intermediate_size=[48] * 4,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
        laurel_rank=8,
        altup_num_inputs=2,
        sliding_window=6,
    ),
    # Mixtures of experts, latent attention, sinks.
    _lm(
        "mixtral",
        _GROUPED,
        num_local_experts=4,
        num_experts_per_tok=2,
        fast=True,
    ),
    _lm("qwen2_moe", _GROUPED, **_MOE, shared_expert_intermediate_size=24, fast=True),
    _lm("qwen3_moe", _HEADED, **_MOE),
    _lm("phimoe", _GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
    _lm("granitemoe", _GROUPED, num_local_experts=4, num_experts_per_tok=2),
    _lm(
        "llama4_text",
        _HEADED,
        intermediate_size_mlp=48,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=6,
        no_rope_layers=[1, 0],
        fast=True,
    ),
    _lm(
        "deepseek_v2",
        _LM,
        **{**_MLA, "topk_method": "greedy"},
        num_key_value_heads=4,
        head_dim=4,
        fast=True,
    ),
    _lm("deepseek_v3", _LM, **_MLA, num_key_value_heads=4, head_dim=4),
    _lm(
        "gpt_oss",
        _HEADED,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        fast=True,
    ),
    # Attention next to recurrence or convolution.
    _lm(
        "qwen3_next",
        _HEADED,
        **_MOE,
        shared_expert_intermediate_size=24,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    _lm(
        "jamba",
        _GROUPED,
        **_MAMBA,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        fast=True,
    ),
    _lm("lfm2", _GROUPED, layer_types=["conv", "full_attention"], block_multiple_of=8),
    _lm(
        "falcon_h1",
        _HEADED,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_n_groups=1,
        mamba_d_state=8,
        mamba_chunk_size=8,
    ),
    _lm(
        "recurrent_gemma",
        {**_GROUPED, "num_key_value_heads": 1},
        num_hidden_layers=3,
        lru_width=32,
        attention_window_size=6,
        block_types=["recurrent", "recurrent", "attention"],
    ),
    # Decoders with attention of their own.
    _lm(
        "bloom",
        {key: value for key, value in _GPT2.items() if key not in ("n_embd", "n_positions")},
        hidden_size=32,
        fast=True,
    ),
    _lm("falcon", new_decoder_architecture=True, num_kv_heads=2, fast=True),
    _lm(
        "mpt",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2},
        expansion_ratio=2,
        max_seq_len=64,
        fast=True,
    ),
    _lm("gptj", _GPT2, rotary_dim=4, fast=True),
    _lm(
        "gpt_neo",
        _LM,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=6,
        fast=True,
    ),
    # Encoders.
    _encoder("bert", fast=True),
    _encoder("roberta", fast=True),
    _encoder("xlm-roberta"),
    _encoder("camembert"),
    _encoder("ernie"),
    _encoder("electra", embedding_size=16),
    _encoder(
        "distilbert",
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
        fast=True,
    ),
    _encoder("albert", embedding_size=16, num_hidden_layers=3, fast=True),
    _encoder("esm", position_embedding_type="rotary", token_dropout=False),
    _encoder("nomic_bert"),
    _encoder("eurobert", _GROUPED, mask_token_id=3),
    _encoder(
        "modernbert",
        _ENCODER,
        local_attention=6,
        layer_types=["full_attention", "sliding_attention"],
        cls_token_id=1,
        sep_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
        fast=True,
    ),
    # Encoders with decoders.
    _seq2seq("t5", _T5, fast=True),
    _seq2seq("mt5", _T5, feed_forward_proj="gated-gelu"),
    _seq2seq("bart", fast=True),
    _seq2seq("pegasus"),
    _seq2seq("marian"),
    _seq2seq("m2m_100"),
    Architecture(
        "whisper",
        {
            **_SEQ2SEQ,
            "num_mel_bins": 8,
            "max_source_positions": 15,
            "max_target_positions": 64,
        },
        build="AutoModelForSpeechSeq2Seq",
        inputs="speech",
        fast=True,
        pads=False,
    ),
    # Images and sounds.
    Architecture(
        "clip",
        {"text_config": _TOWER, "vision_config": _VISION, "projection_dim": 16},
        build="AutoModel",
        inputs="image and text",
        fast=True,
    ),
    Architecture(
        "siglip",
        {"text_config": {**_TOWER, "projection_size": 24}, "vision_config": _VISION},
        build="AutoModel",
        inputs="image and text",
    ),
    Architecture(
        "llava",
        {
            "text_config": {"model_type": "llama", **_GROUPED},
            "vision_config": {"model_type": "clip_vision_model", **_VISION},
            "image_token_index": 90,
            "vision_feature_layer": -1,
            "image_seq_length": 9,
        },
        build="AutoModelForImageTextToText",
        inputs="patches in text",
    ),
    Architecture(
        "qwen2_vl",
        {
            "text_config": {
                **_GROUPED,
                "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
            },
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
        build="AutoModelForImageTextToText",
        inputs="image in text",
        pads=False,
    ),
    Architecture(
        "vit",
        _VISION,
        build="AutoModelForImageClassification",
        inputs="image",
        fast=True,
        pads=False,
    ),
    Architecture(
        "dinov2",
        {**_VISION, "mlp_ratio": 2},
        build="AutoModelForImageClassification",
        inputs="image",
        pads=False,
    ),
    Architecture(
        "wav2vec2",
        {
            **_ENCODER,
            "conv_dim": [16, 16],
            "conv_kernel": [6, 4],
            "conv_stride": [4, 4],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_prob": 0.0,
            "layerdrop": 0.0,
        },
        build="AutoModelForCTC",
        inputs="sound",
        pads=False,
        fast=True,
    ),
    # Attention written out in the model's own code.
    _lm("codegen", _GPT2, rotary_dim=4, fast=True),
    _lm(
        "xglm",
        {"vocab_size": VOCABULARY, "d_model": 32, "ffn_dim": 48, "num_layers": 2},
        attention_heads=4,
    ),
    _lm("openai-gpt", _GPT2, pads=False),
    _encoder("deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], fast=True),
    _encoder("deberta-v2", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _encoder("mpnet"),
    _encoder("roformer"),
    _encoder("big_bird", attention_type="original_full"),
    _lm(
        "xlnet",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_inner": 48, "n_layer": 2, "n_head": 4},
        fast=True,
    ),
    # Refused by name.
    _encoder("longformer", refused="longformer", attention_window=4, fast=True),
    _lm("mamba", _LM, state_size=8, refused="mamba", fast=True),
    _lm(
        "mamba2",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2},
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=1,
        chunk_size=8,
        refused="mamba2",
    ),
    _lm(
        "rwkv",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2},
        attention_hidden_size=32,
        refused="rwkv",
    ),
]
"""Those that are measured, then those that are refused."""
