"""An update that two ranks take together, beside the same update of each one alone.

Two processes share the cores, and both make the same updates at the same time: alone, as learners
that know nothing of each other, and then as ranks, in turns. So the ratio is the cost of what they
say to each other, and of waiting for the slower one.

On a GPU there is one rank, which sums over itself, by NCCL: one that sums nothing takes turns with
it. The cost of a second GPU is not in that.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from bench.codec import filled_columns
from bench.door import run
from bench.ingest_ends import CASES as SCHEMAS
from bench.one_run import CONFIGS, end_with_parent
from bench.paired import Figure, figure, new_parser, publish
from impala_async.config.load import load_config
from impala_async.config.ranks import Place, place_in
from impala_async.learner.agreement import Word, agree
from impala_async.learner.build import pick_device
from impala_async.learner.meeting import Meeting
from impala_async.models.torso import pick_precision
from impala_async.policy import Policy
from impala_async.training.batch import Batch
from impala_async.training.ranks import Ranks
from impala_async.training.step import UpdateStep

COUNT, NUM_WARM, NUM_WORDS, LIMIT_S = 2, 20, 200, 300.0
NOTES = """
Each rank has as many columns as one learner alone: twice the batch in all. A word, the gradients
with losses, the columns of parts where there are several, and what is normalised over all ranks are
each a message over loopback. On two cores each process has one; the learner's loop and actors,
which a training has besides, are not there.

On a GPU a rank sums over itself by NCCL, in turns with a learner that sums nothing: what a word, a
message and its bucket cost, and not what a second GPU and the way to it do.
"""


class Case(NamedTuple):
    name: str
    config: str
    schema: str
    columns: int
    settings: tuple[str, ...]
    at_most: float | None
    """An update together takes so many times as long as one alone."""


CASES = (
    Case("MLP 2x64, IMPALA, 704 rows", "cartpole.toml", "cartpole", 32, (), 1.4),
    Case("MLP 2x64, PPO in parts of 176 rows, all normalised", "cartpole_ppo.toml", "cartpole", 32,
         ("algorithm.normalize_returns=true", "model.normalize_obs=true",
          "algorithm.returns=vtrace"), None),
    Case("Nature CNN, IMPALA, 160 rows", "atari.toml", "frames", 8,
         ("algorithm.num_minibatches=1",), 1.2),
)  # fmt: skip
GPU_CASES = tuple(
    Case(f"{name}, 128 columns of 20 rows", "atari.toml", "frames", 128,
         (f"model.name={name}", "algorithm.num_minibatches=1"), 1.03)
    for name in ("nature_cnn", "impala_resnet")
)  # fmt: skip


class Summing(Ranks):
    """One that is alone and sums all the same."""

    @property
    def are_many(self) -> bool:
        return True


def main() -> int:
    """Measure in turns; 1 if a limit is missed."""
    parser = new_parser("Ranks", __doc__, rounds=7)
    parser.add_argument("--turn-s", type=float, default=2.0, metavar="S")
    parser.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda")
    args = parser.parse_args()
    device = pick_device(args.device)
    if "RANK" in os.environ:
        return measure(args.only, args.rounds, args.turn_s)
    figures: list[Figure] = []
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    for case in GPU_CASES if gpu else CASES:
        if args.only.lower() in case.name.lower():
            measured = on_gpu if gpu else by_two
            figures += figures_of(case, measured(case, args.rounds, args.turn_s))
    return publish("Ranks", figures, notes=NOTES, is_json=args.json, folder=args.write, gpu=gpu)


def on_gpu(case: Case, rounds: int, turn_s: float) -> dict[str, list[float]]:
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    return turns_of(case, Summing(Place()), torch.device("cuda"), rounds, turn_s)


def by_two(case: Case, rounds: int, turn_s: float) -> dict[str, list[float]]:
    """Those of rank 0: both take as long."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(COUNT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "bench.ranks", "--only", case.name]
    command += ["--rounds", str(rounds), "--turn-s", str(turn_s)]
    with tempfile.TemporaryFile() as said:
        ranks = [
            subprocess.Popen(
                command,
                stdout=said if number == 0 else subprocess.DEVNULL,
                env=os.environ | shared | {"RANK": str(number), "LOCAL_RANK": str(number)},
                preexec_fn=end_with_parent,
            )
            for number in range(COUNT)
        ]
        if any([rank.wait(LIMIT_S) for rank in ranks]):
            raise RuntimeError(f"{case.name}: a rank failed")
        said.seek(0)
        turns: dict[str, list[float]] = json.load(said)
        return turns


def figures_of(case: Case, turns: dict[str, list[float]]) -> list[Figure]:
    together, alone = turns["together"], turns["alone"]
    ratios = [a / b for a, b in zip(together, alone, strict=True)]
    limits = {} if case.at_most is None else {"at_most": case.at_most}
    return [
        figure(f"{case.name}: together over alone", ratios, **limits),
        figure("the same: alone", alone, unit="ms"),
        figure("the same: together", together, unit="ms"),
        figure("the same: a word", turns["word"], unit="ms"),
    ]


def measure(name: str, rounds: int, turn_s: float) -> int:
    """The body of one of two ranks."""
    (case,) = (each for each in CASES if each.name == name)
    torch.set_num_threads(1)
    place = place_in()
    with Meeting(place).joined() as ranks:
        ranks.meet(LIMIT_S)
        found = turns_of(case, ranks, torch.device("cpu"), rounds, turn_s)
    if place.is_first:
        print(json.dumps(found), flush=True)
    return 0


def turns_of(
    case: Case, ranks: Ranks, device: torch.device, rounds: int, turn_s: float
) -> dict[str, list[float]]:
    """Milliseconds of an update in each turn, and of a word."""
    schema = SCHEMAS[case.schema][0]
    sides = {
        "alone": make_step(case, Ranks(), device),
        "together": make_step(case, ranks, device),
    }
    planes = (torch.from_numpy(each).to(device) for each in filled_columns(schema, case.columns)[1])
    batch = Batch.in_planes(schema, *planes)
    batch.mask_BT[:] = True
    alive_B = torch.ones(case.columns, dtype=torch.bool)
    found: dict[str, list[float]] = {"alone": [], "together": [], "word": []}
    planned = dict.fromkeys(sides, NUM_WARM)
    # The first turn warms all up, and says how many updates fill one.
    for turn in range(rounds + 1):
        for side, step in sides.items():
            each_ms = time_of(step, batch, alive_B, planned[side], ranks)
            if turn:
                found[side].append(each_ms)
            else:
                own = int(1000 * turn_s / each_ms) + 1
                planned[side] = min(map(int, ranks.gather(b"%d" % own)))
        found["word"].append(time_of_words(ranks))
    found["word"] = found["word"][1:]
    return found


def time_of(
    step: UpdateStep, batch: Batch, alive_B: torch.Tensor, num_updates: int, ranks: Ranks
) -> float:
    """Milliseconds of an update; both ranks begin at once, and make as many."""
    own, num_rows = Word(num_rows=int(batch.mask_BT.sum())), None
    agree(ranks, own)
    started = time.perf_counter()
    for _ in range(num_updates):
        if step.ranks.are_many:
            num_rows = agree(ranks, own).num_rows
        step.run(batch, alive_B, 0, num_rows=num_rows)
    return 1000 * (time.perf_counter() - started) / num_updates


def time_of_words(ranks: Ranks) -> float:
    started = time.perf_counter()
    for _ in range(NUM_WORDS):
        agree(ranks, Word())
    return 1000 * (time.perf_counter() - started) / NUM_WORDS


def make_step(case: Case, ranks: Ranks, device: torch.device) -> UpdateStep:
    config = load_config(CONFIGS / case.config, case.settings)
    schema = SCHEMAS[case.schema][0]
    policy = Policy(schema, config.model, seed=0, device=device)
    policy.compute_in(pick_precision(config.model.precision, policy.torso_name, policy.device))
    is_graphed = device.type == "cuda"
    return UpdateStep(policy, config.algorithm, is_graphed=is_graphed, ranks=ranks)


if __name__ == "__main__":
    run(main)
