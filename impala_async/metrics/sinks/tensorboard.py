"""TensorBoard: an event file in the run folder, which `tensorboard --logdir` shows.

Written by tensorboardX, since torch's own writer takes two seconds to import.
"""

from typing import Any

from tensorboardX import SummaryWriter

from impala_async.metrics.names import Value, numbers
from impala_async.metrics.sinks import Run


class TensorBoardSink:
    """Writes each number under its name, and under those of other libraries, by env steps.

    Args:
        run: the run it belongs to.
        settings: for `tensorboardX.SummaryWriter`; `logdir` is `tensorboard` in the run folder.
    """

    def __init__(self, run: Run, **settings: Any) -> None:
        # Steps that an earlier start wrote and a resumed one trains again are hidden.
        usual = {"logdir": str(run.folder / "tensorboard"), "purge_step": run.env_steps or None}
        self._writer = SummaryWriter(**usual | settings)

    def write(self, report: dict[str, Value]) -> None:
        found = numbers(report)
        for name, value in found.items():
            self._writer.add_scalar(name, value, int(found["env_steps_trained"]))

    def close(self) -> None:
        self._writer.close()
