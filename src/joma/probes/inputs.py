"""What a model is called with: windows of tokens, or inputs of any kind given by name."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from joma.common.checks import whole_number
from joma.errors import JomaError

Windows = Tensor | Sequence[Sequence[int]]
Inputs = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Keyword arguments of one forward pass, or of several."""

_GIVE_INPUTS = "measure it with joma.probes.probe(model, inputs=...)"
_TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 16384}


@dataclass(frozen=True, eq=False)
class ProbeBatch:
    """What one forward pass reads.

    Attributes:
        given: Keyword arguments of the model, or the tokens alone, (B, T).
        tokens: Tokens at the places sampled; empty where inputs are no tokens.
        rows: Numbers of these places among all B · T.
        places: B · T, or 0 where inputs are no tokens.
        start: How many examples were read before.
        total: How many there are.
    """

    given: Mapping[str, Any] | Tensor
    tokens: Tensor
    rows: Tensor
    places: int
    start: int
    total: int

    def on(self, device: torch.device) -> "ProbeBatch":
        """Return the batch with its tensors on a device."""
        given = self.given
        if isinstance(given, Mapping):
            moved = {name: it.to(device) for name, it in given.items() if isinstance(it, Tensor)}
            given = {**given, **moved}
        else:
            given = given.to(device)
        tokens, rows = self.tokens.to(device), self.rows.to(device)
        return replace(self, given=given, tokens=tokens, rows=rows)

    def run(self, model: nn.Module) -> None:
        """Call the model, without its head where it reads windows: nothing here needs logits."""
        if isinstance(self.given, Mapping):
            model(**self.given)
        else:
            run_on_tokens(model, self.given)


def run_on_tokens(model: nn.Module, tokens: Tensor) -> None:
    """Call a model with a text, a Hugging Face model without its head.

    A decoder after an encoder is given the same text, as in training shifted to the right by the
    token it starts with.
    """
    body = getattr(model, "base_model", model)
    if not hasattr(model, "config") or not hasattr(body, "get_input_embeddings"):
        model(tokens)
        return
    model = body
    taken = inspect.signature(model.forward).parameters
    if "input_ids" not in taken:
        raise JomaError(f"{type(model).__name__} reads no tokens; {_GIVE_INPUTS}")
    given: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    if "decoder_input_ids" in taken:
        start = getattr(model.config, "decoder_start_token_id", None)
        first = tokens[:, :1] if start is None else torch.full_like(tokens[:, :1], start)
        given["decoder_input_ids"] = torch.cat([first, tokens[:, :-1]], 1)
    try:
        model(**given)
    except (AttributeError, TypeError, ValueError) as error:
        # Of the model's own code: a model of images and text says what it lacks.
        if isinstance(error, JomaError) or not _raised_in("transformers", error):
            raise
        raise JomaError(
            f"{type(model).__name__} cannot be run on a text alone ({error}); {_GIVE_INPUTS}"
        ) from error


def _raised_in(package: str, error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return name.partition(".")[0] == package


def batches(
    windows: Windows | Inputs | None,
    inputs: Inputs | None,
    sample: int,
    seed: int,
    device: torch.device,
    at_once: int | None,
) -> list[ProbeBatch]:
    """Return windows or inputs as batches, with a random sample of the tokens.

    Args:
        windows: (number, length), tokens.
        inputs: Keyword arguments of the model, where there are no windows.
        sample: How many tokens are sampled.
        seed: Decides which.
        device: What the model runs on.
        at_once: Windows of a batch; where None, as many as suit the device.
    """
    one = windows[0] if isinstance(windows, list | tuple) and windows else windows
    if isinstance(one, Mapping) and inputs is None:
        windows, inputs = None, windows  # pyright: ignore[reportAssignmentType]
    if (windows is None) == (inputs is None):
        got = "both" if inputs is not None else "neither"
        raise JomaError(f"probe takes windows of tokens or inputs, got {got}")
    whole_number("sample", sample, 1)
    generator = torch.Generator().manual_seed(whole_number("seed", seed, 0))

    def chosen(like: Tensor) -> Tensor:
        """Return which places are sampled, bool."""
        places = torch.zeros(like.numel(), dtype=torch.bool)
        places[torch.randperm(len(places), generator=generator)[:sample]] = True
        return places.view(like.shape)

    if inputs is not None:
        every = _inputs(inputs)
        return [_given_batch(it, number, len(every), chosen) for number, it in enumerate(every)]
    tokens = _windows(windows)  # pyright: ignore[reportArgumentType]
    suits = max(1, _TOKENS_AT_ONCE.get(device.type, 16384) // tokens.shape[1])
    size = suits if at_once is None else whole_number("batch", at_once, 1)
    parts = zip(tokens.split(size), chosen(tokens).split(size), strict=True)
    return [
        _batch(part, part, places, number * size, len(tokens))
        for number, (part, places) in enumerate(parts)
    ]


def _given_batch(
    given: Mapping[str, Any], number: int, total: int, chosen: Callable[[Tensor], Tensor]
) -> ProbeBatch:
    tokens, mask = given.get("input_ids"), given.get("attention_mask")
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        none = torch.empty(0, dtype=torch.long)
        return ProbeBatch(given, none, none, 0, number, total)
    places = chosen(tokens)
    if isinstance(mask, Tensor) and mask.shape == tokens.shape:
        places &= mask.cpu() != 0
    return _batch(given, tokens.cpu(), places, number, total)


def _batch(
    given: Mapping[str, Any] | Tensor, tokens: Tensor, chosen: Tensor, start: int, total: int
) -> ProbeBatch:
    places = chosen.reshape(-1)
    rows = places.nonzero().squeeze(1)
    return ProbeBatch(given, tokens.reshape(-1)[places], rows, places.numel(), start, total)


def _inputs(inputs: Inputs) -> list[Mapping[str, Any]]:
    batches = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    if not batches or not all(isinstance(one, Mapping) and one for one in batches):
        raise JomaError(
            "inputs must be keyword arguments of the model, or a list of such, one for each "
            f"forward pass, got {type(inputs).__name__}"
        )
    return batches


def _windows(windows: Windows) -> Tensor:
    try:
        tokens = torch.as_tensor(windows)
    except (ValueError, TypeError) as error:
        raise JomaError(f"windows must be of one length, tokens in each ({error})") from None
    if tokens.ndim != 2 or tokens.numel() == 0 or tokens.is_floating_point():
        raise JomaError(
            f"windows must be whole numbers (number, length), got {tokens.dtype} of shape "
            f"{tuple(tokens.shape)}"
        )
    return tokens.to("cpu", torch.long)
