"""Trainings whose state is known, on which the rules of `joma.train.findings` are judged.

    python -m benchmarks.findings train --out DIR [--workers 2] [--only PATTERN] [--scale small]
                                          [--device cuda --scale large]
    python -m benchmarks.findings judge DIR [--half choose | held-out | both]

Tiny transformers (Llama, GPT-NeoX, `nn.TransformerEncoder`, T5, GPT-2) learn synthetic sequences,
each watched by a `joma.Monitor`. A `Case` says what was done to the training and whether it is
sick, healthy or worth a note. The run folder of each case is kept, so that rules are judged without
training again. Which half a case belongs to was decided before any threshold was (`split`).
"""

from benchmarks.findings._case import ARCHITECTURES, KINDS, Case
from benchmarks.findings._split import split

__all__ = ["ARCHITECTURES", "KINDS", "Case", "split"]
