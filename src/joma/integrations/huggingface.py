"""The monitor, and per-layer updates, in Hugging Face's Trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from joma.errors import how_to_install
from joma.integrations._training import BackwardPasses, MonitoredTraining
from joma.train.monitor import Monitor

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        f"joma.integrations.huggingface needs transformers: {how_to_install('hf')}"
    ) from error


class MonitorCallback(TrainerCallback):
    """Watches the model of a Hugging Face Trainer.

        trainer = Trainer(model, arguments, callbacks=[MonitorCallback(every=100)], …)
        trainer.train()

    The monitor records every step of the optimizer, after it and before gradients are cleared,
    however many batches it took. When training ends the findings are printed. Gradients are seen
    as the optimizer saw them: clipped, if they are.

    The loss of a step is what the model returned, mean over its batches as the Trainer takes it,
    NaN included. A model that returns none (the Trainer smooths labels, or has a loss of its own)
    is recorded with the losses that the Trainer logs.

    Training resumed from a checkpoint resumes the newest run folder, from the same step; give
    `inputs`, so that measurements before and after are on the same inputs. Where `stop_on` asks for
    it, the Trainer ends the training after the step.

    Args:
        **monitor_options: Options of `joma.Monitor`. `run` is OUTPUT_DIR/monitor unless given; a
            second training there writes to OUTPUT_DIR/monitor-2.
    """

    def __init__(self, **monitor_options: Any) -> None:
        self._training = MonitoredTraining(monitor_options)
        self._hook: RemovableHandle | None = None
        self._losses: list[Tensor] = []
        self._counted = False
        self._recorded = 0

    @property
    def monitor(self) -> Monitor:
        """Of the training that runs, or ran last."""
        return self._training.monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the monitor to the model."""
        model: nn.Module = kwargs["model"]
        self._leave()
        self._training.begin(
            model,
            kwargs.get("optimizer"),
            step=state.global_step,
            folder=Path(args.output_dir or ".") / "monitor",
        )
        self._losses, self._recorded = [], state.global_step
        # The Trainer may compile the model around it.
        hook: Callable[..., None] = torch.compiler.disable(self._keep_loss)  # type: ignore[assignment]
        self._hook = model.register_forward_hook(hook, with_kwargs=True)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record a step: the weights have moved, and gradients are still there."""
        loss = None
        if self._losses:
            self._recorded = state.global_step + 1
            losses = torch.stack(self._losses)
            if self._counted:  # each is its share of the step's loss
                share = args.world_size if args.average_tokens_across_devices else 1
                loss = losses.sum() * share
            else:
                loss = losses.mean()
        self._losses = []
        if self._training.step(loss, speaks=state.is_world_process_zero):
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the Trainer's own loss, where the model returned none."""
        loss = (kwargs.get("logs") or {}).get("loss")
        if self._hook is None or loss is None or self._recorded >= state.global_step:
            return
        self._recorded = state.global_step
        self.monitor.record_loss(state.global_step, loss)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the loss of an evaluation while training runs."""
        loss = (kwargs.get("metrics") or {}).get("eval_loss")
        if self._hook is not None and loss is not None:
            self.monitor.record_validation(loss, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the findings and print them."""
        self._leave()
        self._training.end(says=True)

    def _keep_loss(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Keep the loss of one batch, on its device."""
        if not (model.training and torch.is_grad_enabled()):
            return  # an evaluation
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(loss, Tensor):
            self._counted = kwargs.get("num_items_in_batch") is not None
            self._losses.append(loss.detach().mean())

    def _leave(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


class PerLayerCallback(TrainerCallback):
    """Lets a Trainer accumulate and clip gradients with an optimizer that has `per_layer`.

        trainer = Trainer(
            model,
            arguments,
            optimizer_cls_and_kwargs=(GaLoreAdamW, {"rank": 128, "per_layer": True}),
            callbacks=[PerLayerCallback()],
            …
        )

    The last of `gradient_accumulation_steps` backward passes moves the parameters. Since gradients
    are gone when the Trainer would clip them, `max_grad_norm` becomes the optimizer's `clip_norm`
    unless it has one. Optimizers without `per_layer` need no callback; it changes nothing for them.
    """

    def __init__(self) -> None:
        self._passes: BackwardPasses | None = None
        self._hook: RemovableHandle | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to the model and the optimizer.

        Raises:
            JomaError: Gradients are scaled or averaged after the optimizer has used them.
        """
        self._leave()
        self._passes = BackwardPasses(
            [kwargs.get("optimizer")],
            clip=args.max_grad_norm,
            setting="max_grad_norm",
            scaled=args.fp16,
            processes=args.world_size,
        )
        if self._passes.optimizers:
            # The Trainer may compile the model around it.
            hook: Callable[..., None] = torch.compiler.disable(self._begin_pass)  # type: ignore[assignment]
            self._hook = kwargs["model"].register_forward_pre_hook(hook)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End a backward pass that was not the last of its step."""
        self._end_pass()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the last backward pass of a step."""
        self._end_pass()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach from the model."""
        self._leave()

    def _begin_pass(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if self._passes is not None and model.training and torch.is_grad_enabled():
            from accelerate.state import GradientState

            # The Trainer says here, before each forward pass, whether a step follows it.
            self._passes.begin(last=GradientState().sync_gradients)

    def _end_pass(self) -> None:
        if self._passes is not None:
            self._passes.end()

    def _leave(self) -> None:
        self._end_pass()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
