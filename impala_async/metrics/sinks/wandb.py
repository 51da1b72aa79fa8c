"""Weights & Biases: a run of the same id, which goes on when ours is resumed.

It is begun by the first report, on the thread of the sink: that may take long where its server
cannot be reached, and must not keep training waiting.
"""

import inspect
from typing import Any

import wandb

from impala_async.metrics.names import Value, numbers
from impala_async.metrics.sinks import Run


class WandbSink:
    """Logs each number under its name, and under those of other libraries, by env steps.

    Args:
        run: the run it belongs to.
        settings: for `wandb.init`, for example project, entity, group, tags and mode.
    """

    def __init__(self, run: Run, **settings: Any) -> None:
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
        self._run: Any = None

    def write(self, report: dict[str, Value]) -> None:
        if self._run is None:
            self._run = wandb.init(**self._settings)
            self._run.define_metric("*", step_metric="env_steps_trained")
        self._run.log(numbers(report))

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
