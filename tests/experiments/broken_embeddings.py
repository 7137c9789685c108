"""The claims about embeddings with a wrong constant each."""

import numpy as np

from joma.theory import embeddings, invariants

BROKEN = {
    "sec7-coherence": lambda eps, tokens: 2 * np.log(tokens) / eps**2,
    "sec7-overlaps": lambda eps, m, d: embeddings.expected_overlaps(eps, m, d + 1),
    "sec7-drift": lambda *setting: 1.01 * invariants.token_law_rate(*setting),
    "eqn60": lambda w, u, v, q, xi: embeddings.weight(w, u, v, q, 1.01 * xi),
    "superposition": lambda v, u, xi: embeddings.superposed(v, u, 1.01 * xi),
}
