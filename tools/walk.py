"""Count the hops of a walk through the package: calls from one module of joma into another.

    python tools/walk.py verify|fig6|probe|monitor|galore [--list]

A hop is a call whose caller and callee are functions of two different modules of `joma`. Each pair
of functions counts once, however often it is called, because a reader follows it once. Code that
runs while a module is imported does not count. The caller of a function that another library calls
is the nearest function of `joma` on the stack. The walks:

- `verify`: `joma verify --claim thm2`, the whole command.
- `fig6`: `joma reproduce fig6 --scale tiny --device cpu`, from the command to the end of the first
  training step, which is when the second backward pass begins.
- `probe`: `joma probe MODEL` of a tiny Llama saved to a temporary folder, the whole command.
- `monitor`: a training step of a tiny Llama that the monitor measures, after earlier measurements.
- `galore`: one step of `GaLoreAdamW` without a refresh, of two matrices and an embedding.
"""

import argparse
import contextlib
import io
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

FUNCTION = tuple[str, str]


class Walk:
    """Records the hops made while it is active.

    Attributes:
        hops: Pairs of caller and callee, each a module and a function name, in order of first call.
    """

    def __init__(self) -> None:
        self.hops: dict[tuple[FUNCTION, FUNCTION], None] = {}
        self.active = True

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call, as `sys.setprofile` wants it."""
        if event != "call" or not self.active:
            return
        callee = _function(frame)
        if callee is None:
            return
        caller = _caller(frame)
        if caller is None or caller[0] == callee[0] or (caller, callee) in self.hops:
            return
        if not _is_importing(frame):
            self.hops[caller, callee] = None


def _caller(frame: FrameType) -> FUNCTION | None:
    """Return the nearest function of joma above a frame."""
    above = frame.f_back
    while above is not None:
        function = _function(above)
        if function is not None:
            return function
        above = above.f_back
    return None


def _is_importing(frame: FrameType) -> bool:
    """Return whether a frame runs because a module of joma is being imported."""
    above: FrameType | None = frame
    while above is not None:
        package = above.f_globals.get("__name__", "").split(".")[0]
        if above.f_code.co_name == "<module>" and package == "joma":
            return True
        above = above.f_back
    return False


def _function(frame: FrameType) -> FUNCTION | None:
    """Return module and name of the function a frame runs, or None if it is none of joma's."""
    module = frame.f_globals.get("__name__", "")
    if module != "joma" and not module.startswith("joma."):
        return None
    name = frame.f_code.co_qualname.split(".<locals>")[0]
    return None if name == "<module>" else (module, name)


class _Enough(BaseException):
    """Raised where a walk ends before its command does."""


def walk(name: str) -> Walk:
    """Return the hops of one of the walks."""
    recorder = Walk()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        work = _WALKS[name](Path(folder), recorder, stack)
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(contextlib.chdir(folder))
        threading.setprofile(recorder)
        sys.setprofile(recorder)
        try:
            work()
        except (_Enough, SystemExit):
            pass
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    return recorder


def _command(*argv: str) -> Callable[[], None]:
    from joma.cli import main

    sys.argv = ["joma", *argv]
    return main


def _verify(folder: Path, recorder: Walk, stack: contextlib.ExitStack) -> Callable[[], None]:
    return _command("verify", "--claim", "thm2")


def _fig6(folder: Path, recorder: Walk, stack: contextlib.ExitStack) -> Callable[[], None]:
    import torch

    passes, backward = 0, torch.autograd.backward

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes > 1:
            recorder.active = False
            raise _Enough
        return backward(*given, **named)

    torch.autograd.backward = counted
    stack.callback(setattr, torch.autograd, "backward", backward)
    out = str(folder / "run")
    return _command("reproduce", "fig6", "--scale", "tiny", "--device", "cpu", "--out", out)


def _tiny_llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=2, **sizes))


def _probe(folder: Path, recorder: Walk, stack: contextlib.ExitStack) -> Callable[[], None]:
    _tiny_llama().save_pretrained(folder / "model")
    options = ["--tokenizer", "bytes", "--window", "32", "--windows", "2", "--device", "cpu"]
    return _command("probe", str(folder / "model"), *options)


def _monitor(folder: Path, recorder: Walk, stack: contextlib.ExitStack) -> Callable[[], None]:
    import torch

    from joma import Monitor

    model = _tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(256, (2, 32))
    run = folder / "run"
    monitor = stack.enter_context(Monitor(model, optimizer, run=run, every=2, budget=None))

    def step() -> None:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        monitor.step(loss)
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return step


def _galore(folder: Path, recorder: Walk, stack: contextlib.ExitStack) -> Callable[[], None]:
    import torch
    from torch import nn

    from joma.optim import GaLoreAdamW

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 48), nn.Linear(48, 64))
    optimizer = GaLoreAdamW(model, lr=1e-2, rank=8)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer.step


_WALKS = {
    "verify": _verify, "fig6": _fig6, "probe": _probe, "monitor": _monitor, "galore": _galore
}  # fmt: skip


def main() -> None:
    """Print the number of hops and the rooms and modules they touch."""
    parser = argparse.ArgumentParser(description="Count the hops of a walk")
    parser.add_argument("walk", choices=list(_WALKS))
    parser.add_argument("--list", action="store_true", help="print every hop")
    options = parser.parse_args()
    hops = walk(options.walk).hops
    modules = {function[0] for hop in hops for function in hop}
    rooms = {module.split(".")[1] for module in modules if "." in module}
    print(f"{options.walk}: {len(hops)} hops, {len(modules)} modules, {len(rooms)} rooms")
    if options.list:
        for caller, callee in hops:
            print(f"  {'.'.join(caller)} → {'.'.join(callee)}")


if __name__ == "__main__":
    main()
