"""A model's own text, to judge it on what it knows: stories15M has read children's stories alone.

    python -m benchmarks.sampled_text stories15M.bin stories.txt [--texts 120] [--tokens 250]

Texts are sampled at temperature 1 from the beginning-of-text token, and written one by one.
"""

import argparse
from pathlib import Path

import torch

from joma.common.files import write_bytes
from joma.models import load

AT_ONCE = 40


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("model")
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--texts", type=int, default=120)
    arguments.add_argument("--tokens", type=int, default=250)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    torch.manual_seed(given.seed)
    loaded = load(given.model)
    assert loaded.tokenizer is not None
    begin = loaded.encode("")[0]
    texts: list[str] = []
    while len(texts) < given.texts:
        start = torch.full((min(AT_ONCE, given.texts - len(texts)), 1), begin)
        made = loaded.model.generate(  # type: ignore[operator]
            start,
            attention_mask=torch.ones_like(start),
            do_sample=True,
            max_new_tokens=given.tokens,
            top_k=0,
        )
        for row in (row[1:] for row in made.tolist()):
            kept = row[: row.index(begin)] if begin in row else row
            texts.append(loaded.tokenizer.decode(kept).strip())
    write_bytes(given.out, "\n".join(texts).encode())


if __name__ == "__main__":
    main()
