"""The maps of the architectures known from the start, one each."""

from joma.models._architecture import Architecture, Part, Place


def _decoder(name: str, *model_types: str) -> Architecture:
    """The layout Llama began: separate projections, a gated MLP, grouped keys."""
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
