"""Continue a text: greedily, by sampling, or with beams."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from joma.analysis.generation._reader import Reader
from joma.errors import JomaError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: Logits are divided by it; 0 takes the most likely token.
        top_p: Tokens are drawn from the fewest that have this probability together.
        seed: Decides what is drawn.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise JomaError(f"temperature must be 0 or positive, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise JomaError(f"top-p must be above 0 and at most 1, got {self.top_p}")

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """Return a token for logits, (V,); drawn on the CPU, so that the seed alone decides."""
        if self.temperature == 0:
            return int(logits.argmax())
        share = (logits.cpu().double() / self.temperature).softmax(-1)
        if self.top_p < 1:
            ordered, order = share.sort(descending=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p  # the first one always stays
            share[order[beyond]] = 0.0
        return int(torch.multinomial(share, 1, generator=generator))


def generate_tokens(
    reader: Reader,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling,
    stop: Collection[int] = (),
) -> Iterator[int]:
    """Yield up to `count` tokens that continue a prompt; one that ends the text is not yielded.

    Args:
        reader: Reads with some cache, which is empty.
        prompt: Tokens of the prompt.
        count: New tokens, at most.
        sampling: How each is chosen.
        stop: Tokens that end the text.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    logits = reader.read(prompt)
    for number in range(count):
        token = sampling.choose(logits, generator)
        if token in stop:
            return
        yield token
        if number + 1 < count:
            logits = reader.read([token])


@torch.no_grad()
def search_beams(
    reader: Reader, prompt: Sequence[int], count: int, beams: int, stop: Collection[int] = ()
) -> list[int]:
    """Return the continuation that beam search finds, without the token that ends it.

    Args:
        reader: Reads with some cache, which is empty.
        prompt: Tokens of the prompt.
        count: New tokens, at most.
        beams: How many continuations are kept at a time.
        stop: Tokens that end the text.
    """
    model: nn.Module = reader.model
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    found = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=reader.kv,
        num_beams=beams,
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=sorted(stop) or None,
        pad_token_id=min(stop, default=0),
    )
    tokens = found[0, len(prompt) :].tolist()
    return tokens[: next((k for k, it in enumerate(tokens) if it in stop), len(tokens))]
