"""What a model is called with: windows of tokens, or inputs of any kind given by name."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.probes import _checks

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
        tokens: Tokens at the places sampled, on the CPU; empty where inputs are no tokens.
        rows: Numbers of these places among all B · T.
        places: B · T, or 0 where inputs are no tokens.
        start: How many examples were read before.
    """

    given: Mapping[str, Any] | Tensor
    tokens: Tensor
    rows: Tensor
    places: int
    start: int

    def run(self, model: nn.Module, device: torch.device) -> None:
        """Call the model, without its head where it reads windows: nothing here needs logits."""
        if isinstance(self.given, Mapping):
            moved = {
                name: value.to(device) if isinstance(value, Tensor) else value
                for name, value in self.given.items()
            }
            model(**moved)
            return
        tokens = self.given.to(device)
        body = getattr(model, "base_model", model)
        if hasattr(model, "config") and hasattr(body, "get_input_embeddings"):
            _read(body, tokens)
        else:
            model(tokens)


def _read(model: nn.Module, tokens: Tensor) -> None:
    """Call a Hugging Face model with a text; a decoder after an encoder is given the same text.

    As in training, the decoder's tokens are shifted to the right by the token it starts with.
    """
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


class Reader:
    """Windows or inputs as batches, with a random sample of the tokens.

    Args:
        windows: (number, length), tokens.
        inputs: Keyword arguments of the model, where there are no windows.
        sample: How many tokens are sampled.
        seed: Decides which.
    """

    def __init__(
        self, windows: Windows | Inputs | None, inputs: Inputs | None, sample: int, seed: int
    ) -> None:
        if _are_inputs(windows) and inputs is None:
            windows, inputs = None, windows  # pyright: ignore[reportAssignmentType]
        if (windows is None) == (inputs is None):
            got = "both" if inputs is not None else "neither"
            raise JomaError(f"probe takes windows of tokens or inputs, got {got}")
        _checks.whole("sample", sample, 1)
        self._generator = torch.Generator().manual_seed(_checks.whole("seed", seed, 0))
        self._sample = sample
        self._windows = None if windows is None else _windows(windows)  # pyright: ignore[reportArgumentType]
        self._inputs = [] if inputs is None else _inputs(inputs)

    def batches(self, device: torch.device, at_once: int | None) -> Iterator[ProbeBatch]:
        """Yield all batches; windows are read `at_once`, by default as many as suit the device."""
        if self._windows is None:
            yield from self._given_batches()
            return
        windows = self._windows
        size = at_once or max(1, _TOKENS_AT_ONCE.get(device.type, 16384) // windows.shape[1])
        chosen = self._chosen(windows.numel()).view_as(windows)
        for start in range(0, len(windows), size):
            tokens = windows[start : start + size]
            yield _batch(tokens, tokens, chosen[start : start + size], start)

    def __len__(self) -> int:
        return len(self._inputs) if self._windows is None else len(self._windows)

    def _given_batches(self) -> Iterator[ProbeBatch]:
        none = torch.empty(0, dtype=torch.long)
        for number, given in enumerate(self._inputs):
            tokens, mask = given.get("input_ids"), given.get("attention_mask")
            if not isinstance(tokens, Tensor) or tokens.ndim != 2:
                yield ProbeBatch(given, none, none, 0, number)
                continue
            chosen = self._chosen(tokens.numel()).view(tokens.shape)
            if isinstance(mask, Tensor) and mask.shape == tokens.shape:
                chosen &= mask.cpu() != 0
            yield _batch(given, tokens.cpu(), chosen, number)

    def _chosen(self, places: int) -> Tensor:
        """Which of so many places are sampled, bool."""
        chosen = torch.zeros(places, dtype=torch.bool)
        chosen[torch.randperm(places, generator=self._generator)[: self._sample]] = True
        return chosen


def _batch(
    given: Mapping[str, Any] | Tensor, tokens: Tensor, chosen: Tensor, start: int
) -> ProbeBatch:
    places = chosen.reshape(-1)
    rows = places.nonzero().squeeze(1)
    return ProbeBatch(given, tokens.reshape(-1)[places], rows, places.numel(), start)


def _are_inputs(given: Any) -> bool:
    if isinstance(given, Mapping):
        return True
    return isinstance(given, list | tuple) and bool(given) and isinstance(given[0], Mapping)


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
