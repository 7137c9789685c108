"""Fig. 10 of JoMA: MLP nodes that answer to unrelated combinations of tokens, found and scored.

For every node of an MLP the contexts at which it is largest are grouped by what their query attends
to in that layer; a node scores high where two groups are tight and have nothing to do with each
other. A best of many pairs of groups is large by chance alone, so every score is compared with two
controls that go through the same steps: contexts shuffled among nodes, and an untrained model.

- `search` scores every node of a model; `SearchResult` has the scores and what they show.
- `examples` gives the best nodes with their contexts as text.
- `tables` makes columns of both, for a run folder.
- `SearchSettings` says how contexts are taken and grouped, `check` whether a model and a text can
  be searched, and `estimate` what that takes.
- `best_pairs` and `unrelated_groups` group contexts by their similarities, `dealt` is the control
  that deals contexts out at random, and `spread` chooses windows evenly over a text.
"""

from joma.analysis.superposition._contexts import LayerContexts, SearchSettings, dealt, spread
from joma.analysis.superposition._examples import Context, FoundNode, Group, examples, tables
from joma.analysis.superposition._groups import GroupPairs, best_pairs, unrelated_groups
from joma.analysis.superposition._search import (
    LayerScores,
    SearchResult,
    check,
    estimate,
    quantile,
    search,
)

__all__ = [
    "Context",
    "FoundNode",
    "Group",
    "GroupPairs",
    "LayerContexts",
    "LayerScores",
    "SearchResult",
    "SearchSettings",
    "best_pairs",
    "check",
    "dealt",
    "estimate",
    "examples",
    "quantile",
    "search",
    "spread",
    "tables",
    "unrelated_groups",
]
