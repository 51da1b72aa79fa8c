"""The ranks of one learner: which of them this process is, and its share of the settings.

A rank is a learner process that torchrun, or whatever else sets the same variables, has started:
all of them together train one policy, each on its own columns of every batch.
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from impala_async import __version__
from impala_async.config.evaluate import EvaluateSection
from impala_async.config.load import by_key
from impala_async.config.run import RunConfig
from impala_async.errors import ConfigError, Exit, ImpalaAsyncError, RankError

FOLDER = "ranks"
"""The other ranks have their run folders there, in that of rank 0."""
NEEDED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# So far apart that ranks of a host may listen on a port and the next one.
PORTS = 2
# No two ranks step the same environments. A prime, so that seeds of a series of runs differ too.
SEED_STEP = 1_000_003


@dataclass(frozen=True)
class Place:
    """The place of this process among the ranks of a learner; alone if nothing says otherwise."""

    number: int = 0
    count: int = 1
    local: int = 0
    """Its number among those of its host."""
    num_local: int = 1
    """How many its host has, as far as that is told."""

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def prefix(self) -> str:
        """The beginning of a line of this rank, where others say some too."""
        return f"rank {self.number}: " if self.count > 1 else ""

    def folder(self, run: Path) -> Path:
        """The run folder of this rank; rank 0 has that of the run."""
        return run if self.is_first else run / FOLDER / str(self.number)

    def run_of(self, folder: Path) -> Path:
        """The folder of rank 0, from that of this rank."""
        return folder if self.is_first else folder.parent.parent

    def check_shared(self, folder: Path) -> None:
        """ConfigError where rank 0 has begun, and not in the folder that this rank knows."""
        run = self.run_of(folder)
        if not (run / "config.json").exists():
            raise ConfigError(
                f"--run-dir: rank 0 has no run in {run}: give all ranks the same folder, which "
                "their hosts share"
            )

    def check_whole(self, run: Path) -> None:
        """ConfigError where a part of a run is named for the run."""
        if run.parent.name == FOLDER and run.name.isdecimal():
            raise ConfigError(
                f"--resume: {run} is of one rank of the run in {run.parent.parent}: name that one"
            )

    def actor_seed(self, seed: int) -> int:
        return (seed + SEED_STEP * self.number) % 2**31


def place_in(environ: Mapping[str, str] = os.environ) -> Place:
    """Read the variables of torchrun; ConfigError for what is none."""
    found = {}
    for name, usual in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        text = environ.get(name, str(usual))
        if not text.isdecimal():
            raise ConfigError(f"{name}: wants a whole number, as torchrun sets it, got {text!r}")
        found[name] = int(text)
    number, count, local, num_local = found.values()
    place = Place(number, count, local, num_local)
    if place.number >= place.count:
        raise ConfigError(f"RANK ({place.number}) must be below WORLD_SIZE ({place.count})")
    if place.count > 1 and (missing := [name for name in NEEDED if name not in environ]):
        raise ConfigError(
            f"{missing[0]} is not set, and WORLD_SIZE is {place.count}: start ranks by torchrun, "
            "which sets both, or drop WORLD_SIZE"
        )
    if place.count > 1 and not environ["MASTER_PORT"].isdecimal():
        raise ConfigError(f"MASTER_PORT: wants a port, got {environ['MASTER_PORT']!r}")
    return place


def prefix_here() -> str:
    """That of this process; none where it cannot be told which rank it is."""
    with suppress(ConfigError):
        return place_in().prefix
    return ""


def share_of(config: RunConfig, place: Place, *, has_actors: bool = True) -> RunConfig:
    """The settings by which this rank serves: the numbers of a config are of all ranks together.
    A learner alone has no actors to share, but in lockstep it has their number."""
    if place.count == 1:
        return config
    learner, train, bind = config.learner, config.train, config.bind
    _divide("learner.batch_columns", learner.batch_columns, place)
    if has_actors or config.pace.is_lockstep:
        _divide("train.num_actors", train.num_actors, place)
    if learner.num_passes == "auto":
        raise ConfigError(
            f"learner.num_passes (auto) does not go with {place.count} ranks, which idle at "
            "different times: wants a whole number"
        )
    if config.algorithm.intrinsic_reward is not None:
        raise ConfigError(
            f"algorithm.intrinsic_reward does not go with {place.count} ranks: each would learn "
            "its own"
        )
    if ":" in learner.device:
        raise ConfigError(
            f"learner.device ({learner.device}): {place.count} ranks have a GPU each: wants cuda, "
            "auto or cpu"
        )
    columns, actors = learner.batch_columns // place.count, -(-train.num_actors // place.count)
    if config.actor.least_envs > columns:
        raise ConfigError(
            f"learner.batch_columns ({learner.batch_columns}) on {place.count} ranks are {columns} "
            f"each, and must be at least actor.num_envs ({config.actor.least_envs})"
        )
    # One that is killed lacks the newest that the others have, who must have the one before; and
    # that one stays while ranks tell each other what they have.
    keep = max(2, config.checkpoint.keep)
    shared = {
        "checkpoint": config.checkpoint.model_copy(update={"keep": keep}),
        "learner": learner.model_copy(update={"batch_columns": columns}),
        "train": train.model_copy(update={"num_actors": actors}),
        "bind": bind.model_copy(
            update={name: _own_port(getattr(bind, name), place) for name in ("data", "weights")}
        ),
    }
    if not place.is_first:
        # Rank 0 evaluates, and ends the run where that reaches the goal.
        shared["evaluate"] = EvaluateSection()
        shared["stop"] = config.stop.model_copy(update={"eval_return": None})
    return config.model_copy(update=shared)


def in_common(config: RunConfig) -> dict[str, Any]:
    """All that ranks must have alike, by its name: hosts have addresses of their own."""
    settings = {key: v for key, v in by_key(config).items() if not key.startswith("bind.")}
    return {"the release of impala-async": __version__} | settings


def check_alike(of_ranks: Sequence[Mapping[str, Any]]) -> None:
    """ConfigError for the first thing that is not alike at all ranks."""
    for number, each in enumerate(of_ranks):
        for name, value in of_ranks[0].items():
            if each.get(name) != value:
                raise ConfigError(
                    f"{name} is {json.dumps(value)} at rank 0, and {json.dumps(each.get(name))} at "
                    f"rank {number}: start all ranks alike"
                )


def words_of(error: ImpalaAsyncError | OSError) -> bytes:
    """An error of this rank, for the others."""
    code = error.exit_code if isinstance(error, ImpalaAsyncError) else Exit.TRY_AGAIN
    return f"{int(code)} {error}".encode(errors="replace")


def error_of(number: int, words: bytes) -> ImpalaAsyncError:
    """The error here by which another rank cannot start."""
    code, _, text = words.decode().partition(" ")
    kind = ConfigError if code == str(int(Exit.CONFIG)) else RankError
    return kind(f"rank {number} cannot start: {text}")


def risks(place: Place, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Warnings of a start that may go wrong later."""
    found = []
    restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and restarts != "0":
        found.append(
            "torchrun often fails to start ranks again: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "
            "in its environment"
        )
    if place.num_local != place.count and "GLOO_SOCKET_IFNAME" not in environ:
        name = socket.gethostname()
        with suppress(OSError):
            if (address := socket.gethostbyname(name)).startswith("127."):
                found.append(
                    f"this host's own name, {name}, leads to {address}: where ranks of other hosts "
                    "do not reach this one, name its network by GLOO_SOCKET_IFNAME"
                )
    return found


def _divide(key: str, number: int, place: Place) -> None:
    if number % place.count:
        raise ConfigError(
            f"{key} ({number}) must be a multiple of the number of ranks ({place.count})"
        )


def _own_port(url: str, place: Place) -> str:
    host, _, port = url.rpartition(":")
    return url if port == "*" else f"{host}:{int(port) + PORTS * place.local}"
