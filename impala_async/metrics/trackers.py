"""Sinks for TensorBoard and for Weights & Biases, whose packages are imported where one is made.

Each writes the numbers of a report under their names, and under those of other libraries, by env
steps.
"""

import inspect
from typing import Any

from impala_async.metrics.names import Value, numbers
from impala_async.metrics.sinks import Run


class TensorBoardSink:
    """An event file in the run folder, which `tensorboard --logdir` shows.

    Args:
        run: the run it belongs to.
        settings: for `tensorboardX.SummaryWriter`; `logdir` is `tensorboard` in the run folder.
    """

    def __init__(self, run: Run, **settings: Any) -> None:
        # torch's own writer takes two seconds to import.
        from tensorboardX import SummaryWriter

        # Steps that an earlier start wrote and a resumed one trains again are hidden.
        usual = {"logdir": str(run.folder / "tensorboard"), "purge_step": run.env_steps or None}
        self._writer = SummaryWriter(**usual | settings)

    def write(self, report: dict[str, Value]) -> None:
        found = numbers(report)
        for name, value in found.items():
            self._writer.add_scalar(name, value, int(found["env_steps_trained"]))

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases that has our id, and goes on when ours is resumed.

    It is begun by the first report, on the thread of the sink: that may take long where its server
    cannot be reached, and must not keep training waiting.

    Args:
        run: the run it belongs to.
        settings: for `wandb.init`, for example project, entity, group, tags and mode.
    """

    def __init__(self, run: Run, **settings: Any) -> None:
        import wandb

        usual = {
            "project": "impala-async",
            "name": run.folder.name,
            "id": run.run_id,
            "resume": "allow",
            "dir": str(run.folder),
            "config": dict(run.config),
            # The terminal belongs to our progress.
            "settings": {"console": "off"},
        }
        self._settings = usual | settings
        # A setting that does not exist is told of now.
        inspect.signature(wandb.init).bind(**self._settings)
        self._init: Any = wandb.init
        self._run: Any = None

    def write(self, report: dict[str, Value]) -> None:
        if self._run is None:
            self._run = self._init(**self._settings)
            self._run.define_metric("*", step_metric="env_steps_trained")
        self._run.log(numbers(report))

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
