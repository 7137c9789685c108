"""Other people's trainers and dashboards: where `joma.Monitor` meets them.

What may live here is glue: when to call the monitor in a loop that somebody else wrote, which of
its backward passes ends a step, and how to log numbers to a dashboard. What is measured, and when,
lives in `joma.train.monitor`. Each module needs a package that joma itself does not, and says which
where it is missing; nothing here is imported unless it is asked for.

- `huggingface.MonitorCallback`, `huggingface.PerLayerCallback`: for `transformers.Trainer`.
- `lightning.MonitorCallback`, `lightning.PerLayerCallback`: for Lightning's `Trainer`.
- `loggers.tensorboard`, `loggers.wandb`, `loggers.trackio`: for `Monitor(loggers=[…])`.
"""
