"""How much of a bare training loop's speed the learner service keeps, fed as fast as it takes it.

Real environments are recorded for some seconds; `replay` then plays the recording without end into
the learner service, over the wire. A bare torch loop takes turns with it, in a process
of its own, on one batch of the same recording: with its network, loss, optimizer, precision, shape.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from bench.door import run
from bench.learner_ends import record, serve
from bench.one_run import CONFIGS, ENDLESS
from bench.paired import Figure, Sample, figure_of, in_turns, new_parser, publish, ratio, write_page
from impala_async.config.load import load_config
from impala_async.config.run import RunConfig
from impala_async.learner.build import pick_device

# Where there is no Atari, images of its shape do as well: nothing is learned here.
NO_ATARI = ("env.id=bench.sliding:Sliding", "env.frame_stack=on")
# A bare loop makes one update of a batch: as large a one as those of the config's two parts.
ONE_PART = ("actor.num_envs=8", "learner.batch_columns=8", "algorithm.num_minibatches=1")
GPU_FIGURES = {
    "sm_share": ("share of the time in which a kernel ran", ""),
    "pcie_in_gb_s": ("over PCIe to it", "GB/s"),
    "pcie_out_gb_s": ("over PCIe from it", "GB/s"),
}
NOTES = """
"Service" is the learner as users start it, a process that also receives, checks and publishes. A
player that replays the recording is another process, and nobody holds it back. "Update alone" is
the learner's own update step in a loop over one batch, without a service. The bare loop is written
by hand and has its batch ready: rewards clipped, frames unfolded, nothing checked or reported. Both
make the same weights of the same batch, which a test compares.

CartPole's update is written out in numpy (docs/adr/0028), and the bare loop is torch's, which
dispatches some two hundred small operations. The update step has more to do, as Pong's shows: it
makes discounts, scaled rewards and the count of valid rows of each batch, copies the observations
out of a slot, where columns lie apart, selects valid rows in each term of the loss before it
computes, so that nothing that a masked row holds reaches a gradient, and keeps the terms apart for
the report. It also looks at the loss and the norm before it steps.

On a GPU waits for copies are at most what is told. `nvidia-smi dmon` tells of the GPU itself while
the service is measured, and of PCIe by short looks once a second. One player feeds the service for
every four cores, four at most: where the learner waits for batches for more than a moment, the
ratio is that of the players and of the event loop, which receives what they send.

Rates are updates per second times the rows of a batch. An update in the service and the waits are
those that the learner thread reports; cores are processor seconds per second of its process.

The service adds to an update of the MLP what the event loop does meanwhile: each of the two threads
waits while the other holds the interpreter's lock. To an update of the CNN it adds a snapshot of
6.7 MB, and batches that no cache knows yet.
"""


class Case(NamedTuple):
    """A run that is recorded and trained on; `at_least` is of the service over the bare loop."""

    name: str
    config: str
    settings: tuple[str, ...]
    num_recorded_rows: int
    at_least: float


CARTPOLE = Case("CartPole, MLP 2x64", "cartpole.toml", (), 20_000, at_least=0.92)
PONG = Case("Pong, Nature CNN", "atari.toml", ONE_PART, 2_560, at_least=0.97)


def main() -> int:
    """Measure what suits the device; 1 if a limit was missed."""
    parser = new_parser("Learner", __doc__, rounds=5)
    parser.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda")
    parser.add_argument("--turn-s", type=float, default=8.0, metavar="S", help="of a turn (8)")
    args = parser.parse_args()
    device = pick_device(args.device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(device):
            if args.only.lower() in case.name.lower():
                case = case._replace(settings=(*case.settings, f"learner.device={device}"))
                samples = measure(case, Path(folder), args.rounds, args.turn_s)
                figures += figures_of(case, samples, has_gpu=gpu is not None)
                if args.write:
                    # Cases are long: what is measured is kept whatever becomes of the next one.
                    write_page("Learner", figures, notes=NOTES, folder=args.write, gpu=gpu)
    told = {"notes": NOTES, "is_json": args.json, "folder": args.write, "gpu": gpu}
    return publish("Learner", figures, **told)


def cases(device: torch.device) -> list[Case]:
    """The cases: on a CPU those of the configs, on a GPU images in batches that are worth one."""
    pong = PONG
    if importlib.util.find_spec("ale_py") is None:
        pong = pong._replace(name="Images, Nature CNN", settings=(*pong.settings, *NO_ATARI))
    if device.type != "cuda":
        return [CARTPOLE, pong]
    return [
        pong._replace(
            name=f"{torso}, {columns} columns",
            settings=(
                *pong.settings,
                f"model.name={torso}",
                f"learner.batch_columns={columns}",
            ),
            at_least=0.95,
        )
        for torso in ("nature_cnn", "impala_resnet")
        for columns in (32, 128, 512, 1024)
    ]


def measure(case: Case, folder: Path, rounds: int, seconds: float) -> dict[str, list[Sample]]:
    """Measure the bare loop, the update alone and the service, in turns."""
    settings = [*case.settings, *ENDLESS]
    config = load_config(CONFIGS / case.config, settings)
    path = folder / case.name
    record(path, CONFIGS / case.config, [*settings, f"stop.env_steps={case.num_recorded_rows}"])
    turn = 0

    def service() -> Sample:
        nonlocal turn
        turn += 1
        run_dir = folder / f"{case.name}, {turn}"
        return serve(path, run_dir, settings, seconds, pick_device(config.learner.device))

    sides: dict[str, Callable[[], Sample]] = {
        "bare": lambda: loop("bare", path, config, seconds),
        "step": lambda: loop("step", path, config, seconds),
        "service": service,
    }
    rows = config.trajectory.rows * config.learner.batch_columns
    return {
        side: [{**sample, "rows_per_s": rows * sample["updates_per_s"]} for sample in samples]
        for side, samples in in_turns(sides, rounds).items()
    }


def loop(kind: str, recording: Path, config: RunConfig, seconds: float) -> Sample:
    """A loop without a service, in a fresh process; what fails there ends the benchmark."""
    settings = json.dumps(config.model_dump(mode="json", by_alias=True))
    told = [kind, str(recording), settings, str(seconds)]
    command = [sys.executable, "-m", "bench.bare_loop", *told]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if ended.returncode != 0:
        sys.exit(f"{kind} ended with exit code {ended.returncode}: nothing to publish")
    sample: Sample = json.loads(ended.stdout)
    return sample


def figures_of(
    case: Case, samples: dict[str, list[Sample]], *, has_gpu: bool = False
) -> list[Figure]:
    bare, step, service = (samples[side] for side in ("bare", "step", "service"))
    key = "rows_per_s"
    return [
        ratio(f"{case.name}: service over bare loop", service, bare, key, at_least=case.at_least),
        ratio("the same: update alone over bare loop", step, bare, key),
        ratio("the same: service over update alone", service, step, key),
        figure_of("the same: bare loop", bare, key, "rows/s"),
        figure_of("the same: service", service, key, "rows/s"),
        ratio("the same: an update in the service over one alone", service, step, "update_ms"),
        figure_of(
            "the same: waits for batches, share of the learner thread", service, "wait_share"
        ),
        figure_of("the same: event loop", service, "loop_cores", "cores"),
        figure_of("the same: all other threads of the process", service, "other_cores", "cores"),
        *(gpu_figures_of(service) if has_gpu else []),
    ]


def gpu_figures_of(service: list[Sample]) -> list[Figure]:
    """Its waits, and what it told of itself in every turn."""
    told = [key for key in GPU_FIGURES if all(key in sample for sample in service)]
    return [
        figure_of(
            "the same: waits for copies, share of the time",
            service,
            "load_wait_share",
            at_most=0.02,
        ),
        *(
            figure_of(f"the same: {GPU_FIGURES[key][0]}", service, key, GPU_FIGURES[key][1])
            for key in told
        ),
    ]


if __name__ == "__main__":
    run(main)
