"""What single queries attend to: rows of the attention, without the other rows."""

import torch
from torch import Tensor

from joma.probes.tap import AttentionCall


def attention_rows(call: AttentionCall, sequence: int, positions: Tensor) -> Tensor:
    """Attention of some queries of one sequence over its keys, the mean over heads, (n, S).

    The mean over heads is what the MLP gets to see of what the position attended to, before the
    heads' own maps: a head that rests on the sink has little to say in it once that is left out.

    Args:
        call: the queries and keys of a layer.
        sequence: which sequence of the batch.
        positions: of the queries, (n,).
    """
    if call.scores is not None:
        return call.scores[sequence, :, positions].float().softmax(-1).mean(0)
    query = call.query[sequence, :, positions].float()
    key = call.key[sequence].float()
    heads, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    key = key.repeat_interleave(heads // key.shape[0], 0)
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    scores = query @ key.mT * scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    seen = _seen(call, sequence, positions, keys)
    if call.mask is not None:
        whole = (call.query.shape[0], heads, call.query.shape[2], keys)
        mask = call.mask.expand(whole)[sequence, :, positions]
        if mask.dtype == torch.bool:
            seen = seen & mask
        else:
            scores = scores + mask.float()
    scores = scores.masked_fill(~seen, -torch.inf)
    # A row that sees no key would be NaN.
    if call.sinks is not None:  # one more outcome, which is no key
        sinks = call.sinks.float()[:, None, None].expand(heads, queries, 1)
        scores = torch.cat((scores, sinks), -1)
    rows = scores.softmax(-1)[..., :keys].nan_to_num_(0.0).mean(0)
    assert rows.shape == (queries, keys)
    return rows


def _seen(call: AttentionCall, sequence: int, positions: Tensor, keys: int) -> Tensor:
    """Which keys each query may see, (n, S)."""
    own = (positions + keys - call.query.shape[2]).unsqueeze(-1)
    places = torch.arange(keys, device=positions.device)
    seen = torch.ones(len(positions), keys, dtype=torch.bool, device=positions.device)
    if call.causal:
        seen &= places <= own
    if call.window is not None:
        seen &= (places - own).abs() < call.window
    if call.padding is not None:
        seen &= call.padding[sequence]
    return seen
