"""Training steps on tensors without numbers that stand for those of a GPU, and their memory.

Used by `python -m benchmarks.memory --simulated`. The real optimizers, with the Python code of
GaLore's kernels, train the real model in torch's FakeTensorMode, and storages are counted from
their first sight to their end: nothing is shared with `joma.train.memory`. Assumed, because no GPU
decides it:

- attention without a mask runs in flash attention (bfloat16) and otherwise in the memory-efficient
  kernel; both save the log-sum-exp, and their backward pass takes a float32 copy of the queries'
  gradient and the row sums for its own time
- fused AdamW and SGD need no workspace; a norm in float64 takes a float64 copy of its tensor
- gradients of embeddings of more than 3,072 tokens are summed in float32
- cuBLAS takes 32 MiB for each of two threads, as on Hopper; nothing else is allocated inside torch
- a storage takes a multiple of 512 bytes, as the CUDA allocator gives them out

Everything else, such as the float32 logits of the loss and the norms' float32 intermediates, are
operations that transformers calls, and they are counted as such.
"""

import contextlib
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from joma.models import enable_checkpointing

CUBLAS = 2 * 32 * 2**20
STEPS = 2
_FEW_TOKENS = 3072
aten: Any = torch.ops.aten
_IN_PLACE = (aten._fused_sgd_.default, aten._fused_adamw_.default)
"""Fused updates: they change their arguments, and allocate and return nothing."""


def simulate(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    batch: int,
    window: int,
    *,
    checkpointing: bool = False,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    loss_of: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> int:
    """Return the most bytes that two training steps would have allocated on a GPU.

    Args:
        model: A model on the meta device, which is changed.
        make_optimizer: Makes the optimizer.
        batch: Number of sequences.
        window: Length of a sequence.
        checkpointing: Whether blocks compute their activations again.
        prepare: Changes the model before the optimizer is made, as LoRA does.
        loss_of: Returns the loss of tokens; that of the model's labels unless given.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        model = prepare(model)
        stack.enter_context(_kernels())
        stack.enter_context(_without_memory())
        _place(model)
        if checkpointing:
            again = {
                "use_reentrant": False,
                "context_fn": lambda: (contextlib.nullcontext(), _GpuFunctions()),
            }
            enable_checkpointing(model, again)
        optimizer = make_optimizer(model)
        allocated = stack.enter_context(_Allocated())
        for tensor in (*model.parameters(), *model.buffers()):
            allocated.add(tensor)
        stack.enter_context(_Kernels())
        stack.enter_context(_GpuFunctions())
        for _ in range(STEPS):
            tokens = torch.zeros(batch, window, dtype=torch.long)
            if loss_of is not None:
                loss = loss_of(model, tokens)
            else:
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    return allocated.peak + CUBLAS


def _without_memory() -> FakeTensorMode:
    """Return a mode that refuses operations it lacks: by default it runs them on real tensors."""
    return FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


def _place(model: nn.Module) -> None:
    """Give the model tensors that have a device, as far as one can tell, and no numbers."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, old in list(table.items()):
                if old is None:
                    continue
                if id(old) not in made:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    is_weight = isinstance(old, nn.Parameter)
                    made[id(old)] = nn.Parameter(new, old.requires_grad) if is_weight else new
                table[name] = made[id(old)]  # type: ignore[assignment]


class _Allocated(TorchDispatchMode):
    """Adds up storages as the CUDA allocator does, from their first sight to their end."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once."""
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._known:
            return
        self._known.add(place)
        size = -(-storage.nbytes() // 512) * 512
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._end, place, size)

    def _end(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, FakeTensor):
                self.add(one)
        return made


class _Kernels(TorchDispatchMode):
    """Answers what depends on numbers, and allocates what kernels take for their own time."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            # True, and 1: counters are int64. An int32 says whether a factorisation failed.
            kind = args[0].dtype
            return (
                True
                if kind == torch.bool
                else 1.0
                if kind.is_floating_point
                else int(kind == torch.int64)
            )
        if func in _IN_PLACE:
            return None
        scratch = [torch.empty(size, dtype=torch.uint8) for size in _workspaces(func, args, kwargs)]
        made = func(*args, **kwargs)
        del scratch
        return made


def _workspaces(func: Any, args: tuple[Any, ...], kwargs: Any) -> list[int]:
    """Return bytes of what a kernel allocates and frees."""
    if func in (
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
    ):
        query = args[1]
        copy = 4 * query.numel() if query.dtype != torch.float32 else 0
        return [copy, 4 * query.numel() // query.shape[-1]]
    if func is aten.linalg_vector_norm.default:
        kind = kwargs.get("dtype")
        if kind == torch.float64 and args[0].dtype != kind:
            return [8 * args[0].numel()]
    if func is aten.embedding_dense_backward.default and args[1].numel() > _FEW_TOKENS:
        return [4 * args[0].numel()]
    return []


class _GpuFunctions(TorchFunctionMode):
    """Calls the operations that a GPU would run for attention and dropout."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is torch.nn.functional.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.shape[:-2] != key.shape[:-2] and not enable_gqa:  # no fused kernel broadcasts heads
        formula = aten._scaled_dot_product_attention_math.default
        return formula(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        flash = aten._scaled_dot_product_flash_attention.default
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (one.repeat_interleave(times, -3) for one in (key, value))
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:  # torch makes it a matrix of 0 and −∞
            bias = torch.zeros_like(bias, dtype=query.dtype)
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    efficient = aten._scaled_dot_product_efficient_attention.default
    return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input


@contextlib.contextmanager
def _kernels() -> Iterator[None]:
    """Let the real code believe in a GPU: buffers are allocated, and launches do nothing."""
    import transformers.masking_utils

    from joma.optim.galore import adamw

    class Launch:
        def __init__(self, function: Any) -> None:
            pass

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **more: None

    class Constant:
        def __init__(self, value: Any) -> None:
            self.value = value

    language: Any = types.ModuleType("triton.language")
    language.constexpr = Constant
    triton: Any = types.ModuleType("triton")
    triton.language, triton.jit = language, Launch
    triton.cdiv = lambda a, b: -(-a // b)
    triton.set_allocator = lambda function: None
    name = "joma.optim.galore._step_kernels"
    stubs = {"triton": triton, "triton.language": language}
    before = {key: sys.modules.get(key) for key in (*stubs, name)}
    has_kernels, is_cuda = adamw.has_kernels, FakeTensor.is_cuda
    masking_utils: Any = transformers.masking_utils
    is_tracing = masking_utils.is_tracing
    masking_utils.is_tracing = lambda tensor=None: False  # else it makes masks for any case
    sys.modules.update(stubs)
    adamw.has_kernels = lambda device: True  # type: ignore[assignment]
    FakeTensor.is_cuda = property(lambda tensor: True)  # type: ignore[assignment]
    try:
        yield
    finally:
        adamw.has_kernels = has_kernels
        masking_utils.is_tracing = is_tracing
        FakeTensor.is_cuda = is_cuda  # type: ignore[assignment]
        for key, module in before.items():
            sys.modules.pop(key, None)
            if module is not None:
                sys.modules[key] = module
