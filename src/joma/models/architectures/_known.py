"""The maps of known architectures, and the map of a given model."""

from collections.abc import Mapping

from torch import nn

from joma.errors import JomaError
from joma.models.architectures._map import Architecture, Config, config_entry, config_of
from joma.models.parts import Part, Place


def _decoder(name: str, *model_types: str) -> Architecture:
    """Return the layout Llama began: separate projections, a gated MLP, grouped keys."""
    return Architecture(
        name=name,
        model_types=model_types,
        prefixes=("", "model."),
        embedding=Place("embed_tokens.weight"),
        query=Place("layers.{layer}.self_attn.q_proj.weight"),
        key=Place("layers.{layer}.self_attn.k_proj.weight"),
        value=Place("layers.{layer}.self_attn.v_proj.weight"),
        output=Place("layers.{layer}.self_attn.o_proj.weight"),
        mlp_lower=Place("layers.{layer}.mlp.gate_proj.weight"),
        mlp_up=Place("layers.{layer}.mlp.up_proj.weight"),
        layer="layers.{layer}",
        attention="layers.{layer}.self_attn",
        mlp_down="layers.{layer}.mlp.down_proj",
        key_value_heads="num_key_value_heads",
    )


_GPT2 = Architecture(
    name="GPT-2",
    model_types=("gpt2",),
    prefixes=("", "transformer."),
    embedding=Place("wte.weight"),
    query=Place("h.{layer}.attn.c_attn.weight", Part(0, of=3), transposed=True),
    key=Place("h.{layer}.attn.c_attn.weight", Part(1, of=3), transposed=True),
    value=Place("h.{layer}.attn.c_attn.weight", Part(2, of=3), transposed=True),
    output=Place("h.{layer}.attn.c_proj.weight", transposed=True),
    mlp_lower=Place("h.{layer}.mlp.c_fc.weight", transposed=True),
    layer="h.{layer}",
    attention="h.{layer}.attn",
    mlp_down="h.{layer}.mlp.c_proj",
    heads="n_head",
)

_GPT_NEOX = Architecture(
    name="GPT-NeoX",
    model_types=("gpt_neox",),
    prefixes=("", "gpt_neox."),
    embedding=Place("embed_in.weight"),
    query=Place("layers.{layer}.attention.query_key_value.weight", Part(0, of=3, by_head=True)),
    key=Place("layers.{layer}.attention.query_key_value.weight", Part(1, of=3, by_head=True)),
    value=Place("layers.{layer}.attention.query_key_value.weight", Part(2, of=3, by_head=True)),
    output=Place("layers.{layer}.attention.dense.weight"),
    mlp_lower=Place("layers.{layer}.mlp.dense_h_to_4h.weight"),
    layer="layers.{layer}",
    attention="layers.{layer}.attention",
    mlp_down="layers.{layer}.mlp.dense_4h_to_h",
)

_OPT = Architecture(
    name="OPT",
    model_types=("opt",),
    prefixes=("", "decoder.", "model.decoder."),
    # In OPT-350M the embedding is narrower than the residual stream, which project_in leads to.
    embedding=Place("embed_tokens.weight"),
    query=Place("layers.{layer}.self_attn.q_proj.weight"),
    key=Place("layers.{layer}.self_attn.k_proj.weight"),
    value=Place("layers.{layer}.self_attn.v_proj.weight"),
    output=Place("layers.{layer}.self_attn.out_proj.weight"),
    mlp_lower=Place("layers.{layer}.fc1.weight"),
    layer="layers.{layer}",
    attention="layers.{layer}.self_attn",
    mlp_down="layers.{layer}.fc2",
)

_BERT = Architecture(
    name="BERT",
    model_types=("bert",),
    prefixes=("", "bert."),
    embedding=Place("embeddings.word_embeddings.weight"),
    query=Place("encoder.layer.{layer}.attention.self.query.weight"),
    key=Place("encoder.layer.{layer}.attention.self.key.weight"),
    value=Place("encoder.layer.{layer}.attention.self.value.weight"),
    output=Place("encoder.layer.{layer}.attention.output.dense.weight"),
    mlp_lower=Place("encoder.layer.{layer}.intermediate.dense.weight"),
    layer="encoder.layer.{layer}",
    attention="encoder.layer.{layer}.attention.self",
    mlp_down="encoder.layer.{layer}.output.dense",
)

MAPS = (
    _GPT2,
    _GPT_NEOX,
    _OPT,
    _decoder("Llama", "llama", "mistral", "smollm3"),
    _BERT,
    _decoder("Gemma", "gemma", "gemma2", "gemma3_text"),
)

_registered: list[Architecture] = []


class UnknownArchitectureError(JomaError):
    """No map for an architecture; the message has lines: the module tree, and a map to fill in."""

    verbatim = True


def architecture_of(model_or_config: nn.Module | Config) -> Architecture:
    """Return the map of a model, or of a configuration before anything is loaded.

    Raises:
        UnknownArchitectureError: there is none; it shows the module tree and how to write one.
    """
    architecture = known_architecture(model_or_config)
    if architecture is not None:
        return architecture
    known = sorted({name for known in (*MAPS, *_registered) for name in known.model_types})
    raise UnknownArchitectureError(
        f"no map says where the weights of {_model_type(model_or_config)!r} are; known are "
        f"{', '.join(known)}.\n" + how_to_map(model_or_config)
    )


def how_to_map(model_or_config: nn.Module | Config) -> str:
    """Return a model's tree and how to write its map, for the message of an error."""
    tree = _tree_of(model_or_config)
    return (
        f"{tree}Write its map{' from this tree' if tree else ''} in Python, before the model is "
        "used, or in a file for joma probe --map:\n"
        + _EXAMPLE.replace("MODEL_TYPE", _model_type(model_or_config))
    )


def registered_for(model_or_config: nn.Module | Config) -> Architecture | None:
    """Return the map that `register` added for this kind of model, None where none was."""
    model_type = _model_type(model_or_config)
    return next((it for it in reversed(_registered) if model_type in it.model_types), None)


def known_architecture(model_or_config: nn.Module | Config) -> Architecture | None:
    """Return the map of a model or configuration, None where there is none."""
    model_type = _model_type(model_or_config)
    known = (it for it in MAPS if model_type in it.model_types)
    return registered_for(model_or_config) or next(known, None)


def register(architecture: Architecture) -> None:
    """Add a map; for a `model_type` that has one already, the newer is used."""
    _registered.append(architecture)


_EXAMPLE = """\
    from joma.models import Architecture, Part, Place, register
    register(Architecture(
        name="MODEL_TYPE", model_types=("MODEL_TYPE",), prefixes=("", "model."),
        embedding=Place("embed_tokens.weight"),
        query=Place("layers.{layer}.self_attn.qkv.weight", Part(0, of=3)),  # one fused matrix
        key=Place("layers.{layer}.self_attn.qkv.weight", Part(1, of=3)),
        mlp_lower=Place("layers.{layer}.mlp.up.weight"),
        layer="layers.{layer}", attention="layers.{layer}.self_attn",
        mlp_down="layers.{layer}.mlp.down", heads="num_attention_heads",
    ))"""


def _tree_of(model_or_config: nn.Module | Config) -> str:
    if isinstance(model_or_config, nn.Module):
        return module_tree(model_or_config) + "\n"
    try:
        import torch
        from transformers import AutoConfig, AutoModel

        config = model_or_config
        if isinstance(config, Mapping):
            config = AutoConfig.for_model(**config)
        with torch.device("meta"):
            config._attn_implementation = None  # not a configuration's to say
            return module_tree(AutoModel.from_config(config, trust_remote_code=False)) + "\n"
    except Exception:  # a tree that cannot be drawn must not hide the message it is drawn for
        return ""


def _model_type(model_or_config: nn.Module | Config) -> str:
    model_type = config_entry(config_of(model_or_config), "model_type")
    return model_type if isinstance(model_type, str) else type(model_or_config).__name__


def module_tree(module: nn.Module, most_lines: int = 60) -> str:
    """Return names, classes and weight shapes of a module's parts, one line each.

    Of equal neighbours (the blocks of a transformer) the first is shown.
    """
    lines = [type(module).__name__, *_below(module, "  ")]
    if len(lines) > most_lines:
        left_out = len(lines) - most_lines
        lines = [*lines[:most_lines], f"  … and {left_out} lines more"]
    return "\n".join(lines)


def _below(module: nn.Module, indent: str) -> list[str]:
    lines: list[str] = []
    children = list(module.named_children())
    at = 0
    while at < len(children):
        name, child = children[at]
        inside = [_line(child), *_below(child, indent + "  ")]
        end = at + 1
        while end < len(children) and _same(inside, children[end][1], indent):
            end += 1
        label = name if end == at + 1 else f"{name}, likewise to {children[end - 1][0]}"
        lines += [f"{indent}{label}: {inside[0]}", *inside[1:]]
        at = end
    return lines


def _same(inside: list[str], other: nn.Module, indent: str) -> bool:
    # A lone leaf keeps its name: q_proj and k_proj have equal lines and are not the same.
    return len(inside) > 1 and inside == [_line(other), *_below(other, indent + "  ")]


def _line(module: nn.Module) -> str:
    shapes = [
        f"{name} {tuple(parameter.shape)}"
        for name, parameter in module.named_parameters(recurse=False)
        if not name.endswith("bias")
    ]
    return " ".join([type(module).__name__, *shapes])
