"""The names by which models call their projections; a new family adds a line here at most."""

SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("wq", "wk", "wv"),
    ("linear_q", "linear_k", "linear_v"),
    ("to_q", "to_k", "to_v"),
    ("w_q", "w_k", "w_v"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_linear", "k_linear", "v_linear"),
    ("fc_q", "fc_k", "fc_v"),
)
"""Queries, keys and values made by modules of their own."""

FUSED = (
    "query_key_value",
    "qkv_proj",
    "c_attn",
    "wqkv",
    "qkv",
    "in_proj",
    "to_qkv",
    "w_qkv",
    "qkv_linear",
    "c_qkv",
)
"""Queries, keys and values made by one module."""

FUSED_KEY_VALUE = ("kv_proj", "kv", "key_value", "to_kv", "c_attn", "wkv", "linear_kv")
"""Keys and values made by one module, where the queries have another."""

LONE_QUERY = ("q_attn", "q_proj", "query", "q", "to_q", "wq", "q_lin")
"""The queries' module where keys and values are made by one."""

OUTPUT = (
    "o_proj",
    "out_proj",
    "o",
    "out_lin",
    "wo",
    "dense",
    "c_proj",
    "linear_out",
    "to_out.0",
    "to_out",
    "out",
    "proj",
    "output",
    "w_o",
    "out_linear",
    "fc_o",
    "projection",
)
"""The matrix after attention."""

OUTPUT_NEXT_TO_ATTENTION = ("output.dense", "output", "o_proj", "out_proj")
"""The same, in the parent of the module that holds queries and keys (BERT)."""

GATED = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("w1", "w2", "w3"),
    ("w1", "v1", "w2"),
    ("wi_0", "wi_1", "wo"),
    ("gate", "up", "down"),
    ("gate_linear", "up_linear", "down_linear"),
    ("linear_1", "linear_v", "linear_2"),
    ("fc1_g", "fc1_x", "fc2"),
)
"""The gate, its partner and the second matrix of a gated MLP."""

PLAIN = (
    ("gate_up_proj", "down_proj"),
    ("up_proj", "down_proj"),
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("fc_in", "fc_out"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("lin1", "lin2"),
    ("wi", "wo"),
    ("intermediate_dense", "output_dense"),
    ("intermediate.dense", "output.dense"),
    ("ffn", "ffn_output"),
    ("linear1", "linear2"),
    ("linear_1", "linear_2"),
    ("layer_1", "layer_2"),
    ("input_linear", "output_linear"),
    ("linear_in", "linear_out"),
    ("weights_in", "weights_out"),
    ("w_in", "w_out"),
    ("w12", "w3"),
    ("w1", "w2"),
    ("up", "down"),
    ("fc", "proj"),
    ("0", "1"),
    ("0", "2"),
    ("0", "3"),
)
"""The two matrices of an MLP; the first may hold a gate and its partner, one after the other."""

EXPERTS = (
    ("gate_up_proj", "down_proj"),
    ("up_proj", "down_proj"),
    ("input_linear", "output_linear"),
    ("w1", "w2"),
)
"""The same as stacks of matrices, (experts, …, …)."""

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_head")
HEAD_WIDTH = (
    "head_dim",
    "attention_head_size",
    "key_value_proj_dim",
    "head_size",
    "d_kv",
    "depth",
    "dim_head",
)
"""Attributes of attention modules and configurations."""
