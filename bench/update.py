"""The speed that `learner.compile` makes of the learner's update, on one batch again and again.

Real environments are recorded for some seconds. The update step alone, without a service, then
trains on one batch of the recording: as it is written, and in turns with that in each way that the
device has, each turn in a fresh process.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench.door import run
from bench.learner import CONFIGS, ENDLESS, Case, loop, run_cases
from bench.learner_ends import record
from bench.paired import Figure, Sample, figure_of, in_turns, ratio
from impala_async.config.load import load_config

NOTES = """
Updates per second after the first ones. "First update" has compiling or recording in it. Compiled
code is kept in a folder that is empty when a case begins, so its first turn is that of a machine
which has never compiled, the largest figure, and later turns find there what it left. A way that
could not be taken ends the benchmark: no row is of another way than it says.
"""


def main() -> int:
    """Measure what the device can do; nothing here has a limit."""

    return run_cases("Update", __doc__, figures_on, rounds=3, notes=NOTES)


def figures_on(
    device: torch.device, case: Case, folder: Path, rounds: int, seconds: float
) -> list[Figure]:
    """Compare all ways that the device has."""
    return figures_of(case, measure(case, folder, ways_of(device.type), rounds, seconds))


def ways_of(device: str) -> list[str]:
    """The values of `learner.compile` that do something there; the first is the plain one."""
    return ["off", "inductor", *(["cuda_graph"] if device == "cuda" else [])]


def measure(
    case: Case, folder: Path, ways: list[str], rounds: int, seconds: float
) -> dict[str, list[Sample]]:
    """Measure each way, in turns."""
    settings = [*case.settings, *ENDLESS]
    path = folder / case.name
    # A name without spaces: the compiler is called with it.
    compiled = tempfile.mkdtemp(prefix="compiled_", dir=folder)
    record(path, CONFIGS / case.config, [*settings, f"stop.env_steps={case.num_recorded_rows}"])
    sides: dict[str, Callable[[], Sample]] = {}
    for way in ways:
        config = load_config(CONFIGS / case.config, [*settings, f"learner.compile={way}"])
        sides[way] = partial(loop, "step", path, config, seconds, TORCHINDUCTOR_CACHE_DIR=compiled)
    return in_turns(sides, rounds)


def figures_of(case: Case, samples: dict[str, list[Sample]]) -> list[Figure]:
    plain, *others = samples
    figures = [figure_of(f"{case.name}: {plain}", samples[plain], "update_ms", "ms")]
    for way in others:
        figures += [
            ratio(
                f"the same: speed of {way} over {plain}",
                samples[way],
                samples[plain],
                "updates_per_s",
            ),
            figure_of(f"the same: first update of {way}", samples[way], "first_s", "s"),
        ]
    return figures


if __name__ == "__main__":
    run(main)
