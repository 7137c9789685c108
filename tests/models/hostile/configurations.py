"""Configurations: numbers no model has, values of the wrong kind, models of gigabytes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.models.hostile.base import Case, Make, Valid, edited

HUGE = (0, -1, 10**9, 2**31, 2**62, 10**400, 1e308, -1e308)
ODD = ("x", None, [], {}, True, [None], [["x"]], {"a": {}}, float("nan"), float("inf"))
TYPES = (
    "llama", "gemma3", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "jamba", "bloom",
    "gpt_neox", "gpt2", "bert", "t5", "whisper", "clip", "llava", "mamba", "encoder-decoder",
)  # fmt: skip
"""Models whose default is large."""


def configurations(valid: Valid) -> Iterator[Case]:
    """Yields the cases."""
    yield from _configurations(valid)
    yield from _other_models(valid)


def _configurations(valid: Valid) -> Iterator[Case]:
    config = json.loads((valid.folder / "config.json").read_text())

    def changed(**changes: Any) -> Make:
        return edited(valid, "config.json", json.dumps({**config, **changes}).encode())

    keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
            "num_key_value_heads", "vocab_size", "max_position_embeddings", "head_dim",
            "num_labels", "rms_norm_eps", "rope_parameters", "tie_word_embeddings")  # fmt: skip
    for key in keys:
        for number, value in enumerate((*HUGE, *ODD)):
            quick = (key, number) in {
                ("num_hidden_layers", 2), ("num_labels", 2), ("vocab_size", 4),
                ("max_position_embeddings", 4), ("num_hidden_layers", 5), ("hidden_size", 8),
            }  # fmt: skip
            yield Case(f"config {key} {number}", changed(**{key: value}), quick)
    others = {
        "architectures": ([["x"]], [None], "x", 3, ["os"], ["\x1b[2J"], ["LlamaConfig"]),
        "model_type": ("", "\x1b[2J", "auto", "../x", 3, None, "x" * 10**5),
        "dtype": ("complex64", "int8", "x", "os.system", 3),
        "id2label": ({"a": "b"}, {str(n): "x" for n in range(10**5)}),
        "layer_types": (3, [], ["x"], ["full_attention"] * 10**5),
        "quantization_config": ({}, 3, {"quant_method": "x"}),
        "auto_map": ({"AutoConfig": "x.Y"}, 3, {"AutoModel": ["a", "b"]}),
        "pad_token_id": (2**62, -1, 10**6, "x"), "hidden_act": ("x", 3, "os.system", None),
        "text_config": (3, {}, {"model_type": "x"}), "num_local_experts": (10**9, -1),
        "attn_implementation": ("a/b", 3), "pruned_heads": ({"0": [0]}, 3, {"x": 3}),
    }  # fmt: skip
    for key, values in others.items():
        for number, value in enumerate(values):
            quick = key == "architectures" and number < 2
            yield Case(f"config {key} {number}", changed(**{key: value}), quick)
    whole = json.dumps(config)
    raws = [b"", b"{", b"[]", b"null", b"[" * 10**5, b'{"a":' * 10**5, b"\xff\xfe", b"\0" * 99]
    raws += [whole.encode("utf-16"), (whole + "x").encode(), b'{"model_type": "llama"}']
    raws += [b'{"a": ' + b"9" * 5000 + b"}", b"[" + b"[]," * 10**6 + b"[]]"]
    for number, raw in enumerate(raws):
        yield Case(
            f"config raw {number}", edited(valid, "config.json", raw), number in (1, 2, 5, 10)
        )
    for kind in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        yield Case(f"sparse {kind}", _sparse(valid, kind), kind == "config.json")


def _sparse(valid: Valid, file: str) -> Make:
    def make(place: Path) -> Path:
        folder = valid.copy(place)
        with open(folder / file, "wb") as handle:
            handle.truncate(50 * 10**9)
        return folder

    return make


def _other_models(valid: Valid) -> Iterator[Case]:
    """Configurations of a few bytes whose default is a model of gigabytes."""
    for kind in TYPES:
        raw = json.dumps({"model_type": kind}).encode()
        yield Case(f"default {kind}", edited(valid, "config.json", raw), kind in ("llama", "t5"))
    deep = {"model_type": "mixtral", "num_hidden_layers": 1000, "num_local_experts": 1000}
    yield Case("many experts", edited(valid, "config.json", json.dumps(deep).encode()))
    deep = {"model_type": "t5", "num_layers": 2000, "num_decoder_layers": 2000}
    yield Case("two deep stacks", edited(valid, "config.json", json.dumps(deep).encode()))
