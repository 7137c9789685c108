"""The monitor, and per-layer updates, in Lightning's Trainer."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from joma.errors import JomaError, how_to_install
from joma.integrations._training import BackwardPasses, MonitoredTraining
from joma.runs import Run, is_run
from joma.train.monitor import Monitor

if TYPE_CHECKING or importlib.util.find_spec("lightning") is not None:
    from lightning.pytorch import Callback
else:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise ImportError(
            f"joma.integrations.lightning needs lightning: {how_to_install('lightning')}"
        ) from error


class MonitorCallback(Callback):
    """Watches the model of a Lightning Trainer, of `lightning` or of `pytorch_lightning`.

        trainer = Trainer(callbacks=[MonitorCallback(every=100)], …)
        trainer.fit(module)

    The monitor records every step of the optimizer, however many batches it took, while
    gradients are still there. When training ends the findings are printed. With manual
    optimization, gradients are seen where `training_step` leaves them, and a batch in which
    several optimizers step is one step.

    Training resumed from a checkpoint resumes the same run folder, from the same step; give
    `inputs`, so that measurements before and after are on the same data. Where `stop_on` asks for
    it, the Trainer ends the training after the step.

    Args:
        module: name of the submodule to watch, "model" or "net.decoder"; otherwise the one that has
            all parameters if there is such a one, else the LightningModule itself.
        **monitor_options: of `joma.Monitor`.
    """

    def __init__(self, *, module: str | None = None, **monitor_options: Any) -> None:
        self._training = MonitoredTraining(monitor_options)
        self._module = module
        self._step: int | None = None
        self._folder: str | None = None
        self._steps = 0
        self._losses: list[Tensor] = []

    @property
    def monitor(self) -> Monitor:
        """Of the training that runs, or ran last."""
        return self._training.monitor

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the step and the folder."""
        return {"step": self._step, "folder": self._folder}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what a checkpoint kept."""
        self._step, self._folder = state_dict["step"], state_dict["folder"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the monitor to the model."""
        self._steps, self._losses = trainer.global_step, []
        resumed = self._steps > 0
        step = self._step if resumed and self._step is not None else self._steps
        model = _watched(pl_module, self._module)
        # What DDP calls the LightningModule with are the arguments of training_step.
        if (
            model is pl_module
            and trainer.model is not pl_module
            and self._training.options.get("inputs") is None
        ):
            raise JomaError(
                "inputs must be what the LightningModule is called with, or module the name of the "
                f"submodule to watch, since {type(trainer.model).__name__} calls it here"
            )
        folder: Run | Path | None = None
        if resumed and self._folder is not None:  # that run, not a later one next to it
            folder = Path(self._folder)
            folder = Run.open(folder) if is_run(folder) else folder
        monitor = self._training.begin(model, list(trainer.optimizers), step=step, folder=folder)
        self._step = step
        self._folder = None if monitor.run is None else str(monitor.run.path)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record a step, if the optimizer made one."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._losses.append(loss.detach())
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        mean = None
        if self._losses:
            mean = torch.stack(self._losses).mean()
            if pl_module.automatic_optimization:  # which has divided each by this
                mean = mean * trainer.accumulate_grad_batches
        self._losses = []
        if self._training.step(mean, speaks=trainer.is_global_zero):
            trainer.should_stop = True
        assert self._step is not None  # since the training began
        self._step += 1

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the validation loss, where the module logs one as "val_loss"."""
        loss = trainer.callback_metrics.get("val_loss")
        if loss is not None and self._training.running and not trainer.sanity_checking:
            self.monitor.record_validation(loss, self._step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the findings and print them."""
        self._training.end(says=True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write what there is of a training that broke off."""
        self._training.end()


class PerLayerCallback(Callback):
    """Lets a Lightning Trainer accumulate and clip with an optimizer that has `per_layer`.

        trainer = Trainer(accumulate_grad_batches=4, callbacks=[PerLayerCallback()], …)

    The last of `accumulate_grad_batches` backward passes moves the parameters. Since gradients are
    gone when the Trainer would clip them, `gradient_clip_val` becomes the optimizer's `clip_norm`
    unless it has one. With manual optimization, use `optimizer.accumulate` in `training_step`.
    Optimizers without `per_layer` need no callback; it changes nothing for them.
    """

    def __init__(self) -> None:
        self._passes: BackwardPasses | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the optimizers.

        Raises:
            JomaError: Gradients are scaled, clipped by value, or averaged after the optimizer has
                used them.
        """
        clip = trainer.gradient_clip_val
        passes = BackwardPasses(
            trainer.optimizers,
            clip=clip,
            setting="gradient_clip_val",
            scaled=getattr(trainer.precision_plugin, "scaler", None) is not None,
            processes=trainer.world_size,
        )
        if passes.optimizers and clip and trainer.gradient_clip_algorithm == "value":
            raise JomaError(
                'gradient_clip_algorithm must be "norm" with per_layer, which leaves no gradients '
                'whose values could be clipped, got "value"'
            )
        self._passes = passes if pl_module.automatic_optimization else None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin a pass; the last one of an epoch ends a step, too."""
        done = batch_idx + 1
        last = (
            done % trainer.accumulate_grad_batches == 0
            or done == trainer.num_training_batches
            or trainer.is_last_batch
        )
        if self._passes is not None:
            self._passes.begin(last=last)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a pass."""
        self._end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach from the optimizers."""
        self._end()
        self._passes = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the pass of a training that broke off."""
        self._end()

    def _end(self) -> None:
        if self._passes is not None:
            self._passes.end()


def _watched(whole: nn.Module, name: str | None) -> nn.Module:
    if name is not None:
        try:
            return whole.get_submodule(name)
        except AttributeError as error:
            names = ", ".join(child for child, _ in whole.named_children())
            raise JomaError(
                f"module must be the name of a submodule, one of {names} or one inside them, "
                f"got {name!r}"
            ) from error
    every = {id(parameter) for parameter in whole.parameters()}
    for child in whole.children():
        if every and {id(parameter) for parameter in child.parameters()} == every:
            return child
    return whole
