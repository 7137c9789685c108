"""The model of a configuration, its optimizer, and how its loss and gradients are computed.

Compiled, the model, its logits and their cross-entropy are one function. On a GPU the compiler
fuses the cast of the logits, their softmax and the sum, so that they are never written in float32,
and its kernels are replayed as CUDA graphs. A graph writes its results to the same place each time:
a loss is copied before the next piece, and gradients that add up over pieces are tensors of their
own.
"""

import contextlib
import difflib
import hashlib
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from joma.common.quiet import need_transformers, quietly
from joma.common.text import first_line
from joma.errors import JomaError
from joma.optim import Optimizer, registry
from joma.train.language._config import AUTO, Config, ModelSection, OptimizerSection
from joma.train.processes import Processes

_logger = logging.getLogger(__name__)

EVALUATED_AT_ONCE = 16
"""Validation windows in one forward pass that is not compiled."""

BACKEND = "inductor"
"""What compiles; tests choose a faster one."""

_PASSES = 3
"""Passes before training: the first compiles, the second captures a graph, the third replays it."""

_ATTENTION = "joma_causal_sdpa"
"""Name of an attention of transformers for which the library makes no mask."""

_LOSS_APART, _GRADIENTS_APART = 0.02, 0.25
"""Shares by which compiled losses and gradients may differ: far above rounding in bfloat16."""

_RANDOM = re.compile("drop|jitter|noise")
"""In the names of rates with which modules draw random numbers: dropout, noise of a router."""

_SAME = 1e-4
"""Share of the largest logit by which logits may differ where the attention is the same."""

_Loss = Callable[[Tensor], Tensor]


class Compute:
    """The loss of a model and its gradients, a piece of a batch at a time.

    Args:
        model: The model.
        module: The model, or what averages its gradients over the processes.
        config: What is trained, and how.
        processes: The processes that train together.

    Attributes:
        compiled: Whether torch compiles the model.
        graphs: Whether its kernels are replayed as CUDA graphs.
        drops: Whether the model draws random numbers, for dropout.

    Raises:
        JomaError: The optimizer does not go with a compiled model.
    """

    def __init__(
        self, model: nn.Module, module: nn.Module, config: Config, processes: Processes
    ) -> None:
        self.model, self._config, self._processes = model, config, processes
        self.drops = _drops(model)
        self.compiled = compiles(config, processes)
        several = processes.size > 1
        self.graphs = self.compiled and processes.device.type == "cuda" and not several
        half = config.training.precision == "bfloat16"
        self._plain = self._train = _loss_of(model, processes.device.type, half=half)
        self._validate: _Loss | None = None
        if several:  # gradients are exchanged by hooks, between compiled parts
            called = torch.compile(module) if self.compiled else module
            self._train = _loss_of(called, processes.device.type, half=half)
        ones = torch.ones((), device=processes.device)
        self._share = ones / config.training.accumulate
        self._kept: list[tuple[nn.Parameter, Tensor]] = []

    def prepare(self, piece: Tensor) -> None:
        """Compile before training; every result is dropped.

        Args:
            piece: A piece of a batch.

        Raises:
            JomaError: The model cannot be compiled, and the configuration asks for it.
        """
        if not self.compiled or self._processes.size > 1:
            return
        try:
            with warnings.catch_warnings():  # of the compiler, that TF32 is off, which is meant
                warnings.simplefilter("ignore")
                self._compile(piece)
                self._compare(piece)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler, of a compiler it calls, or of what is missing
            inner = getattr(error, "inner_exception", error)
            why = f"torch cannot compile the model ({type(inner).__name__}: {first_line(inner)})"
            if self._config.training.compile != AUTO:
                raise JomaError(f"training.compile must be false or auto here: {why}") from error
            _logger.warning(f"{why}; it is trained uncompiled, which is slower")
            self._train, self._validate = self._plain, None
            self.compiled = self.graphs = False
        self._taken_gradients()
        if self.graphs and self._config.training.accumulate > 1:
            self._kept = [(one, torch.zeros_like(one)) for one in self.model.parameters()]
        self.keep_gradients()

    def backward(self, piece: Tensor, step: int, number: int) -> Tensor:
        """Add the gradients of a piece of a batch; return its loss.

        Args:
            piece: Windows with the token after each.
            step: The step.
            number: Number of the piece in the step.
        """
        self._seed(step, number)
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        loss = self._train(piece)
        torch.autograd.backward(loss, self._share)
        return loss.detach().clone() if self.graphs else loss.detach()

    def keep_gradients(self) -> None:
        """Give parameters gradients of zero where pieces must add up outside of a CUDA graph."""
        if self._kept:
            torch._foreach_zero_([gradient for _, gradient in self._kept])  # pyright: ignore[reportPrivateImportUsage]
        for parameter, gradient in self._kept:
            parameter.grad = gradient

    @torch.no_grad()
    def validation_loss(self, windows: Tensor) -> Tensor:
        """Return the mean loss over windows, without dropout; on the device, in float64.

        Args:
            windows: Windows with the token after each, on any device.
        """
        device, config, size = self._processes.device, self._config, EVALUATED_AT_ONCE
        if self._validate is not None:
            size = config.data.batch // config.training.accumulate
        losses = []
        self.model.eval()
        try:
            for part in windows.split(size):
                # Compiled for one shape: a rest that is smaller would be compiled again.
                loss = self._validate if len(part) == size and self._validate else self._plain
                losses.append(loss(part.to(device)).double() * len(part))
        finally:
            self.model.train()
        return torch.stack(losses).sum() / len(windows)

    def _compile(self, piece: Tensor) -> None:
        mode = "reduce-overhead" if self.graphs and BACKEND == "inductor" else None
        self._train = torch.compile(self._plain, dynamic=False, backend=BACKEND, mode=mode)
        self._validate = torch.compile(self._plain, dynamic=False, backend=BACKEND)
        for _ in range(_PASSES):
            self.backward(piece, 0, 0)
            self._taken_gradients()
        if self._config.validation.every:
            self.validation_loss(piece)

    def _compare(self, piece: Tensor) -> None:
        """Raise where compiled code gives another loss or other gradients than uncompiled code.

        With dropout the two draw different numbers, and nothing is compared.
        """
        if self.drops:
            return
        found, gradients = float(self.backward(piece, 0, 0)), self._taken_gradients()
        loss = self._plain(piece)
        torch.autograd.backward(loss, self._share)
        expected, wanted = float(loss.detach()), self._taken_gradients()
        apart = abs(found - expected) / max(abs(expected), 1.0)
        norms = [
            torch.stack([one.float().norm() for one in several]).norm()
            for several in ([a - b for a, b in zip(gradients, wanted, strict=True)], wanted)
        ]
        turned = float(norms[0] / norms[1].clamp(min=1e-15))
        if not (apart <= _LOSS_APART and turned <= _GRADIENTS_APART):
            raise RuntimeError(
                f"its compiled loss is {apart:.2g} of its size off, and the gradients {turned:.2g}"
            )

    def _taken_gradients(self) -> list[Tensor]:
        """Return the gradients of all parameters, which then have none."""
        taken = []
        for parameter in self.model.parameters():
            gradient, parameter.grad = parameter.grad, None
            taken.append(torch.zeros_like(parameter) if gradient is None else gradient)
        return taken

    def _seed(self, step: int, piece: int) -> None:
        """Seed dropout, so that a training that resumes at a step drops the same."""
        if not self.drops:
            return
        place = f"{self._config.training.seed} {step} {piece} {self._processes.rank}"
        digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
        torch.default_generator.manual_seed(seed)  # some models drop layers by it on a GPU, too
        if self._processes.device.type == "cuda":
            with torch.cuda.device(self._processes.device):
                torch.cuda.manual_seed(seed)


@torch.no_grad()
def without_masks(model: Any, window: int) -> None:
    """Let a model of transformers attend without a mask, where that changes nothing.

    The library looks for sequences packed into one, by values of a tensor: a GPU waits for it in
    every pass, and compiled, where values are not known, it makes a mask of all pairs of tokens,
    with which no flash attention is possible. Here no sequences are packed. The attention itself is
    the same function with the same arguments. Sliding windows, chunks and biases come with the
    mask, so a model is tried first, and keeps its masks unless it gives the same logits.

    Args:
        model: A model that is trained on whole windows alone.
        window: Number of tokens in a sequence.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
    device, training = next(model.parameters()).device, model.training
    ids = (7 * torch.arange(window, device=device) % model.config.vocab_size).unsqueeze(0)
    model.eval()
    try:
        expected = model(input_ids=ids).logits
        model.config._attn_implementation = _ATTENTION
        apart = (model(input_ids=ids).logits - expected).abs().amax()
        same = bool(apart <= _SAME * expected.abs().amax())
    except Exception:  # some models compute with their mask
        same = False
    finally:
        model.train(training)
    if not same:
        model.config._attn_implementation = "sdpa"


def compiles(config: Config, processes: Processes) -> bool:
    """Return whether the model is to be compiled.

    Raises:
        JomaError: That is asked for, and does not go with the optimizer.
    """
    asked = config.training.compile
    per_layer = bool(config.optimizer.given().get("per_layer"))
    if asked is True and per_layer:
        raise JomaError(
            "training.compile must be false or auto with optimizer.per_layer: a compiled backward "
            "pass returns all gradients at its end, so that none could be dropped before"
        )
    if asked == AUTO:
        return processes.device.type == "cuda" and processes.size == 1 and not per_layer
    return bool(asked)


def _loss_of(module: Any, device: str, *, half: bool) -> _Loss:
    """Return the function from windows, each with the token after it, to their mean loss."""

    def loss(windows: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=half):
            logits = module(input_ids=windows[:, :-1]).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    # The compiler keeps what it made with the code, of which it allows few: each has its own.
    loss.__code__ = loss.__code__.replace()
    return loss


def _drops(model: nn.Module) -> bool:
    """Return whether a model draws random numbers in training."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return True
        rates = [value for name, value in vars(module).items() if _RANDOM.search(name)]
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            return True
    return False


_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Special tokens of a type's first model, which another tokenizer has elsewhere or not at all."""

_LONGEST = 240
"""Characters of an error of transformers that are passed on."""


def make_optimizer(model: nn.Module, module: nn.Module, section: OptimizerSection) -> Optimizer:
    """Return the optimizer; matrices decay, biases and the gains of norms do not.

    Args:
        model: The model.
        module: The model, or what averages its gradients over the processes.
        section: The section [optimizer].
    """
    known, settings = registry.defaults(section.name), section.given()
    parameters = list(model.parameters())
    given: Any = [{"params": parameters}]
    if "per_layer" in known:  # it chooses matrices, accumulates, averages and clips by itself
        given = module
        settings["groups"] = _decay_groups(model, settings.get("groups", ()))
        settings.setdefault("clip_norm", section.clip or None)
        if isinstance(settings.get("state_dtype"), str):
            settings["state_dtype"] = _dtype(settings["state_dtype"])
    elif "weight_decay" in known:
        given = [
            {"params": [one for one in parameters if one.ndim >= 2]},
            {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
        ]
        given = [group for group in given if group["params"]]
    if "fused" in known and not settings.keys() & {"fused", "foreach", "differentiable"}:
        settings["fused"] = True
    optimizer = registry.make(section.name, given, section.learning_rate, **settings)
    if not hasattr(optimizer, "param_groups") and (
        section.warmup or section.schedule != "constant"
    ):
        raise JomaError(
            f"optimizer.schedule must be constant without warmup for {section.name}, which has no "
            f"parameter groups whose learning rate could change, got {section.schedule}"
        )
    return optimizer


def _decay_groups(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return groups by regular expression in which biases and the gains of norms do not decay.

    Args:
        model: The model.
        groups: The groups of the user, of which the first that matches a name decides.

    Raises:
        JomaError: A group has no regular expression.
    """
    try:
        patterns = [re.compile(group["match"]) for group in groups]
    except (KeyError, TypeError, re.error) as error:
        raise JomaError(
            f"each of optimizer.groups must have a regular expression as match ({error!r})"
        ) from error
    matched: dict[int, list[tuple[str, bool]]] = {at: [] for at in range(len(groups) + 1)}
    for name, parameter in model.named_parameters():
        at = next((at for at, one in enumerate(patterns) if one.search(name)), len(groups))
        matched[at].append((name, parameter.ndim < 2))
    made: list[dict[str, Any]] = []
    for at, group in enumerate([*groups, {}]):
        flat = [name for name, is_flat in matched[at] if is_flat]
        if flat and "weight_decay" not in group:
            exact = rf"^({'|'.join(map(re.escape, flat))})$"
            made.append({**group, "match": exact, "weight_decay": 0.0})
        if group and (len(flat) < len(matched[at]) or not flat or "weight_decay" in group):
            made.append(dict(group))
    return made


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise JomaError(f"optimizer.state_dtype must be a type of torch, as bfloat16, got {name!r}")
    return found


def make_config(model: ModelSection, vocabulary: int, window: int) -> Any:
    """Return the configuration of transformers for a section [model].

    Args:
        model: The section.
        vocabulary: How many tokens the tokenizer has.
        window: How many tokens a sequence has.

    Raises:
        JomaError: An entry is none of that type's, or does not fit the data.
    """
    need_transformers("joma train")
    from transformers import AutoConfig

    with quietly():
        default = AutoConfig.for_model(model.type)
        known = {*default.to_dict(), *default.attribute_map}
        for name in model.settings:
            if name not in known:
                closest = difflib.get_close_matches(name, known, 5, 0.0)
                raise JomaError(
                    f"model.{name} is no setting of {model.type}; the closest are "
                    f"{', '.join(closest)}"
                )
        settings = {"vocab_size": vocabulary, **dict.fromkeys(_TOKENS), **model.settings}
        try:
            config = AutoConfig.for_model(model.type, **settings)
        except Exception as error:  # checks of values differ from class to class
            raise JomaError(f"[model] cannot be used ({_short(error)})") from error
    if config.vocab_size < vocabulary:
        raise JomaError(
            f"model.vocab_size must be at least {vocabulary}, as many as the tokenizer has, got "
            f"{config.vocab_size}"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < window:
        raise JomaError(
            f"data.window must be at most {positions}, as many positions as the model has, got "
            f"{window}"
        )
    return config


def make_model(config: Any, seed: int | None) -> Any:
    """Return the model of a configuration; its weights depend on the seed alone, on any device.

    The global random numbers continue as if nothing had been drawn.

    Args:
        config: What `make_config` returned.
        seed: The seed; None for a model on the meta device, without weights.
    """
    from transformers import AutoModelForCausalLM

    place = torch.device("meta") if seed is None else contextlib.nullcontext()
    with torch.random.fork_rng(devices=[]), quietly(), place:
        torch.manual_seed(seed or 0)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except Exception as error:  # as above, of values that do not go together
            raise JomaError(f"[model] cannot be built ({_short(error)})") from error
    if seed is not None:
        model.config.use_cache = False  # of no use where every position is computed at once
    return model


def _short(error: BaseException) -> str:
    """Return an error on one line: transformers says what is wrong on the second."""
    words = " ".join(str(error).split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"
