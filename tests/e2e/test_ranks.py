"""Learners that are ranks of one another, with real processes: as torchrun starts them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import psutil
import pytest

from impala_async.config.ranks import Place
from tests.e2e.harness import ONE_THREAD, Site, given, identities_hold, is_alive, module, wait_until
from tests.e2e.test_lockstep import disturbed

pytestmark = pytest.mark.e2e

SMALL = (
    *("env.id=CartPole-v1", "algorithm.name=ppo", "learner.num_passes=2", "trajectory.rows=20"),
    *("actor.num_envs=4", "learner.report_every_s=0.2", "train.num_actors=2"),
)
LOCKSTEP = (*SMALL, "pace.mode=lockstep", "stop.updates=30", "algorithm.num_minibatches=3")
ASYNC = (*SMALL, "learner.batch_columns=16", "checkpoint.every_s=0.5")
# A checkpoint of CartPole has 37 kB of weights; what else a learner writes at once is less.
SHORTER_THAN_WEIGHTS = 20_000
ANY_PORTS = ("bind.data=tcp://127.0.0.1:*", "bind.weights=tcp://127.0.0.1:*")


class Ranks:
    """The ranks of one run, each a `train` of its own, without what starts them again."""

    def __init__(self, folder, count=2):
        self.run_dir, self._folder, self._count = folder / "run", folder, count
        self.sites = [Site(folder / f"of-{number}") for number in range(count)]
        for number, each in enumerate(self.sites):
            each.folder.mkdir(exist_ok=True)
            each.run_dir = self.run_dir if number == 0 else self.run_dir / "ranks" / str(number)

    def start(self, *settings, door="train", flags=(), own=(), **environment):
        """Start all of them. The last one has settings of its `own` besides."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        shared = {"WORLD_SIZE": str(self._count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return [
            site.open(
                door,
                *("--run-dir", str(self.run_dir), *flags, *given(settings)),
                *given(own if number == self._count - 1 else ()),
                **{key: str(value) for key, value in shared.items()},
                RANK=str(number),
                LOCAL_RANK=str(number),
                **environment,
            )
            for number, site in enumerate(self.sites)
        ]

    def trained(self, *settings, **how):
        self.wait_ends(self.start(*settings, **how))

    def wait_ends(self, doors):
        assert [door.wait_exit(90) for door in doors] == [0] * self._count, [d.log for d in doors]
        for site in self.sites:
            assert all(identities_hold(report) for report in site.reports())

    def wait_all(self, what, holds):
        for site in self.sites:
            site.wait_report(what, holds)

    def weights(self):
        """All tensors of each rank's newest checkpoint, those of the optimizer too, in bytes."""
        newest = [site.checkpoints()[-1] for site in self.sites]
        return [b"".join(map(Path.read_bytes, sorted(c.glob("*.safetensors")))) for c in newest]


@contextmanager
def ranks_in(folder, **how):
    folder.mkdir(exist_ok=True)
    opened = Ranks(folder, **how)
    try:
        yield opened
    finally:
        for site in opened.sites:
            site.close()


@pytest.mark.parametrize("count", [2, 3])
def test_lockstep_over_ranks_gives_the_same_weights_though_processes_are_stopped(count, tmp_path):
    found = []
    for disturb in (nullcontext, disturbed):
        with ranks_in(tmp_path / disturb.__name__, count=count) as ranks, ExitStack() as stack:
            falling = "algorithm.lr=1e-3", "algorithm.lr_end=0", "algorithm.schedule_env_steps=9000"
            doors = ranks.start(*LOCKSTEP, *falling, f"train.num_actors={count}")
            stops = [stack.enter_context(disturb(psutil.Process(d.process.pid))) for d in doors]
            ranks.wait_ends(doors)
            assert disturb is nullcontext or sum(map(len, stops)) >= count
            found += ranks.weights()
            reports = [site.reports()[-1] for site in ranks.sites]
            # Rank 0 reports the accounts of all, to the last column.
            assert {report["updates"] for report in reports} == {30}
            (env_steps,) = {report["env_steps_trained"] for report in reports}
            # A schedule goes by the env steps of all.
            for report in reports:
                assert report["algorithm/lr"] == pytest.approx(1e-3 * (1 - env_steps / 9000))
            summary = ranks.sites[0].summary
            columns = reports[0]["trajectories/trained"]
            assert columns == 30 * 4 * count
            assert reports[1]["trajectories/trained"] == 30 * 4
            assert summary["env_steps_trained"] <= columns * 20
    assert len(set(found)) == 1


def test_a_signal_to_one_ends_all_with_the_same_checkpoint(tmp_path):
    with ranks_in(tmp_path) as ranks:
        first, second = ranks.start(*ASYNC)
        ranks.wait_all("training", lambda report: report["updates"] > 20)
        second.tell(signal.SIGTERM)
        told = time.monotonic()
        assert [first.wait_exit(10), second.wait_exit(10)] == [0, 0]
        assert time.monotonic() - told < 10
        assert len(set(ranks.weights())) == 1
        assert {site.summary["exit_reason"] for site in ranks.sites} == {"terminated"}
        # Rank 0 tells of the run, and the other one does not.
        assert ("CartPole-v1: ended" in first.log, "CartPole-v1: ended" in second.log) == (1, 0)


@pytest.mark.parametrize("number", [0, 1])
def test_a_signal_to_one_while_all_start_ends_all_as_soon_as_they_have(number, tmp_path):
    with ranks_in(tmp_path) as ranks:
        doors = ranks.start(*ASYNC, door="learner")
        begun = ranks.sites[number].run_dir / "config.json"
        wait_until("it has begun", begun.exists)
        doors[number].tell(signal.SIGTERM)
        assert [door.wait_exit(30) for door in doors] == [0, 0]
        assert {site.summary["exit_reason"] for site in ranks.sites} == {"terminated"}


LEARNERS = (
    *("env.id=CartPole-v1", "algorithm.num_minibatches=2", "learner.report_every_s=0.2"),
    *("bind.data=tcp://127.0.0.1:*", "bind.weights=tcp://127.0.0.1:*"),
)

UNBUILT = (*LEARNERS, "env.probe=actor")


def started(ranks):
    doors = ranks.start(*UNBUILT, door="learner")
    for site in ranks.sites:
        wait_until("a start", (site.run_dir / "service.json").exists)
    return doors


@pytest.mark.parametrize(
    ("has_actor", "told", "number", "code"),
    [
        (True, [0], signal.SIGTERM, 0),
        (True, [1], signal.SIGTERM, 0),
        (True, [0, 1], signal.SIGTERM, 0),
        (False, [1], signal.SIGINT, 130),
    ],
)
def test_a_signal_before_all_have_built_ends_all(has_actor, told, number, code, tmp_path):
    with ranks_in(tmp_path) as ranks:
        doors = started(ranks)
        if has_actor:
            ranks.sites[0].open("actor", "--learner", str(ranks.run_dir))
            wait_until("one that has built", lambda: any("joined" in door.log for door in doors))
        for each in told:
            doors[each].tell(number)
        assert [door.wait_exit(20) for door in doors] == [code, code]
        assert not any("Traceback" in door.log or "a bug" in door.log for door in doors)


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_has_not_built_ends_soon_though_rank_0_does_not_hear_it(what, tmp_path):
    with ranks_in(tmp_path) as ranks:
        doors = started(ranks)
        os.kill(ranks.sites[0].service["pid"], what)
        doors[1].tell(signal.SIGTERM)
        assert doors[1].wait_exit(20) in (0, 75), doors[1].log
        if what == signal.SIGSTOP:
            doors[0].process.send_signal(signal.SIGCONT)


def test_a_rank_that_is_killed_ends_the_others_and_all_go_on_together(tmp_path):
    with ranks_in(tmp_path) as ranks:
        first, second = ranks.start(*ASYNC)
        ranks.wait_all("training", lambda report: report["updates"] > 20)
        wait_until("checkpoints", lambda: all(site.checkpoints() for site in ranks.sites))
        learner = ranks.sites[1].service["pid"]
        os.kill(learner, signal.SIGKILL)
        assert first.wait_exit(15) == 75
        assert "rank 1 has ended" in first.log
        assert "Traceback" not in first.log
        assert second.wait_exit(15) == 137
        kept = [{path.name for path in site.checkpoints()} for site in ranks.sites]
        common = max(int(name.split("-")[2]) for name in kept[0] & kept[1])
        ranks.trained(f"stop.updates={common + 30}", flags=["--resume"])
        assert len(set(ranks.weights())) == 1
        report = ranks.sites[0].reports()[-1]
        assert report["updates"] >= common + 30
        assert report["env_steps_trained"] > 0


def updates_of(site):
    """Those of which it has a checkpoint."""
    return {int(path.name.split("-")[2]) for path in site.checkpoints()}


def test_a_rank_that_alone_finds_no_room_leaves_all_a_checkpoint_to_go_on_from(tmp_path):
    with ranks_in(tmp_path) as ranks:
        doors = ranks.start(*ASYNC, "checkpoint.every_s=0.2", "checkpoint.keep=2")
        first, second = ranks.sites
        wait_until("checkpoints", lambda: all(len(updates_of(x)) > 1 for x in ranks.sites))
        learner = psutil.Process(second.service["pid"])
        # Its files may be no longer: to it this is a full disk, and to nobody else.
        learner.rlimit(psutil.RLIMIT_FSIZE, (SHORTER_THAN_WEIGHTS, psutil.RLIM_INFINITY))
        wait_until("a save that fails", lambda: "cannot write checkpoint" in doors[1].log)
        newest, later = max(updates_of(second)), set()

        def goes_on():
            later.update(update for update in updates_of(first) if update > newest)
            return len(later) > 4

        wait_until("checkpoints of the other", goes_on)
        learner.kill()
        assert [door.wait_exit(15) for door in doors] == [75, 137]
        # Two, the best and the common one; and the last, if it was just written.
        assert len(updates_of(first)) <= 5
        common = max(updates_of(first) & updates_of(second))
        ranks.trained(f"stop.updates={common + 30}", flags=["--resume"])
        assert len(set(ranks.weights())) == 1
        assert first.reports()[-1]["updates"] >= common + 30


def test_one_address_is_enough_and_a_rank_without_actors_gets_one(tmp_path):
    with ranks_in(tmp_path) as ranks:
        doors = ranks.start(*LEARNERS, door="learner")
        first = ranks.sites[0]
        first.wait_report("a start", lambda report: True)
        actors = [first.open("actor", "--learner", str(ranks.run_dir)) for _ in range(3)]
        first.wait_report("three", lambda report: report["ranks/num_actors"] == [2, 1])
        first.wait_report("training", lambda report: report["updates"] > 10)
        (sent,) = [actor for actor in actors if "sends us to" in actor.log]
        sent.kill()
        lost = time.monotonic()
        first.wait_report("a loss", lambda report: report["ranks/num_actors"] == [2, 0])
        first.wait_report("one moved", lambda report: report["ranks/num_actors"] == [1, 1])
        updates = first.reports()[-1]["updates"]
        first.wait_report("training again", lambda report: report["updates"] > updates + 10)
        assert time.monotonic() - lost < 10  # half of it on two idle cores
        doors[1].tell(signal.SIGTERM)
        assert [door.wait_exit(20) for door in doors] == [0, 0]
        merged, other = (site.reports()[-1] for site in ranks.sites)
        assert all(identities_hold(report) for site in ranks.sites for report in site.reports())
        assert merged["trajectories/received"] > other["trajectories/received"] > 0
        assert other["ranks/num_actors"] is None
        assert len(set(ranks.weights())) == 1


@pytest.mark.parametrize("told", [None, signal.SIGTERM])
def test_a_rank_that_stands_still_is_given_up(told, tmp_path):
    with ranks_in(tmp_path) as ranks:
        first, second = ranks.start(*ASYNC, "learner.stuck_end_s=8")
        ranks.wait_all("training", lambda report: report["updates"] > 20)
        learner = psutil.Process(ranks.sites[1].service["pid"])
        learner.suspend()
        if told is not None:  # while it ends, too
            first.tell(told)
        try:
            assert first.wait_exit(15) == 75
            assert "rank 1 has said nothing for 3.2 s" in first.log
            assert "Traceback" not in first.log
        finally:
            learner.resume()
        # It finds out as soon as it moves, by itself or by those who watch it.
        assert second.wait_exit(15) in (70, 75)


def test_a_run_goes_on_with_more_and_with_fewer_ranks_and_loses_no_account(tmp_path):
    lasting = *ASYNC[:-2], "learner.batch_columns=12"
    received = 0
    for number, count in enumerate((2, 3, 1)):
        with ranks_in(tmp_path / str(count), count=count) as ranks:
            ranks.run_dir = tmp_path / "run"
            for rank, site in enumerate(ranks.sites):
                site.run_dir = Place(rank, count).folder(ranks.run_dir)
            flags = ["--resume"] if number else []
            changes = (*lasting, f"train.num_actors={count}", f"stop.updates={20 + 20 * number}")
            ranks.trained(*changes, flags=flags)
            report = ranks.sites[0].reports()[-1]
            assert identities_hold(report)
            # They are those of all, and of all starts, in the first reports of a start too.
            assert report["trajectories/received"] > received
            received = report["trajectories/received"]
            counts = [each["trajectories/received"] for each in ranks.sites[0].reports()]
            assert counts == sorted(counts)
            assert len(set(ranks.weights())) == 1


NAN_ENV = """
import os

import gymnasium as gym


class Sick(gym.Wrapper):
    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))
        self.steps = 0

    def step(self, action):
        obs, reward, *ends = self.env.step(action)
        self.steps += 1
        if os.environ["RANK"] == "1" and self.steps == 100:
            reward = 1e14
        return obs, reward, *ends
"""


# Rewards of 1 stay finite, squared.
OVERFLOW = ("env.id=sick:Sick", "algorithm.normalize_returns=false", "algorithm.reward_scale=1e10")


def test_rows_of_one_that_make_no_number_are_left_out_by_all(tmp_path):
    path = module(tmp_path, "sick", NAN_ENV)
    with ranks_in(tmp_path) as ranks:
        ranks.trained(*LOCKSTEP, *OVERFLOW, **path)
        assert len(set(ranks.weights())) == 1
        merged, other = (site.reports()[-1] for site in ranks.sites)
        assert merged["learner/skipped_updates"] == other["learner/skipped_updates"] > 0
        assert merged["dropped/nonfinite_update"] == other["dropped/nonfinite_update"] > 0


SLOW_ENV = """
import os
import time

import gymnasium as gym


class Slow(gym.Wrapper):
    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))
        self.seconds = 0.03 if os.environ["RANK"] == "1" else 0.003

    def step(self, action):
        time.sleep(self.seconds)
        return self.env.step(action)
"""


def best_rate(reports, over_s):
    """Most env steps per second over so long, as a machine that has other work may stand still."""
    seen = [(report["learner/wall_s"], report["env_steps_trained"]) for report in reports]
    seen = [each for each in seen if each[0] is not None]
    pairs = ((a, b) for a in seen for b in seen if b[0] - a[0] >= over_s)
    return max((after - before) / (until - since) for (since, before), (until, after) in pairs)


def test_one_slow_rank_does_not_hold_up_all_where_trajectories_are_cut(tmp_path):
    path = module(tmp_path, "slow", SLOW_ENV)
    slow = (*SMALL, "env.id=slow:Slow", "actor.num_envs=1", "pace.mode=lockstep", "stop.wall_s=4")
    rates = []
    for number, more in enumerate(([], ["pace.cut_share=0.5"])):
        with ranks_in(tmp_path / str(number)) as ranks:
            ranks.trained(*slow, *more, **path)
            merged, other = (site.reports()[-1] for site in ranks.sites)
            assert len(set(ranks.weights())) == 1
            # Without cuts, over nearly the whole run: one update takes 0.6 s.
            over_s = 1.5 if more else merged["learner/wall_s"] - 0.5
            rates.append(best_rate(ranks.sites[0].reports(), over_s))
            num_cut, of_slow = merged["lockstep/rows_cut"], other["lockstep/rows_cut"]
            assert num_cut >= of_slow > 0 if more else num_cut == of_slow == 0
            # They are no env steps; of the last batch, which is not trained, some are counted.
            num_masked = 20 * merged["trajectories/trained"] - merged["env_steps_trained"]
            assert num_masked >= num_cut - 2 * 20
    assert rates[1] > 1.5 * rates[0]


def test_bad_settings_are_a_line_at_each_rank(tmp_path):
    bad = {
        "learner.batch_columns=15": "learner.batch_columns (15) must be a multiple of the number "
        "of ranks (2)",
        "train.num_actors=3": "train.num_actors (3) must be a multiple of the number of ranks (2)",
        "learner.num_passes=auto": "learner.num_passes (auto) does not go with 2 ranks",
        "learner.device=cuda:1": "learner.device",
    }
    for setting, told in bad.items():
        with ranks_in(tmp_path) as ranks:
            doors = ranks.start(*ASYNC, setting)
            assert [door.wait_exit(15) for door in doors] == [2, 2]
            for number, door in enumerate(doors):
                assert f"error: rank {number}: {told}" in door.log
                assert "Traceback" not in door.log


def test_a_recording_and_a_folder_in_use_are_refused_at_each_rank(tmp_path):
    with ranks_in(tmp_path) as ranks:
        doors = ranks.start(*ASYNC, flags=("--record", str(tmp_path / "file")))
        assert [door.wait_exit(15) for door in doors] == [2, 2], [d.log for d in doors]
        assert all("--record" in door.log for door in doors)
        first = ranks.start(*ASYNC)
        ranks.wait_all("training", lambda report: report["updates"] > 0)
        doors = ranks.start(*ASYNC)
        assert [door.wait_exit(15) for door in doors] == [2, 2], [d.log for d in doors]
        assert all(str(ranks.run_dir) in door.log for door in doors)
        first[0].process.send_signal(signal.SIGTERM)
        ranks.wait_ends(first)


@pytest.mark.parametrize("door", ["train", "learner"])
def test_a_setting_that_is_wrong_at_one_rank_ends_all(door, tmp_path):
    with ranks_in(tmp_path) as ranks:
        doors = ranks.start(*ASYNC, door=door, own=["learner.batch_columns=15"])
        assert [each.wait_exit(15) for each in doors] == [2, 2]
        told = "learner.batch_columns (15) must be a multiple of the number of ranks (2)"
        assert f"error: rank 0: rank 1 cannot start: {told}" in doors[0].log
        assert f"error: rank 1: {told}" in doors[1].log
        assert not ranks.run_dir.exists()


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ("seed=7", "seed is 0 at rank 0, and 7 at rank 1"),
        ("learner.lease_s=9", "learner.lease_s is "),
    ],
)
def test_a_setting_that_is_another_at_one_rank_ends_all(own, told, tmp_path):
    with ranks_in(tmp_path) as ranks:
        doors = ranks.start(*ASYNC, door="learner", own=[own])
        assert [each.wait_exit(15) for each in doors] == [2, 2], [d.log for d in doors]
        assert all(told in door.log for door in doors), [d.log for d in doors]


def test_an_environment_that_cannot_be_made_at_one_rank_ends_all(tmp_path):
    with ranks_in(tmp_path) as ranks:
        doors = ranks.start(*ASYNC, door="learner", own=["env.id=no.such.module:Name"])
        assert [each.wait_exit(30) for each in doors] == [2, 2], [d.log for d in doors]
        assert "error: rank 0: rank 1 cannot start: " in doors[0].log
        assert all("no.such.module" in door.log for door in doors)


DRIFTING = """
import os
import torch
from torch import nn

class Drifting(nn.Module):
    # The weights of one rank change by themselves, which no sum of gradients shows.
    def __init__(self, spec, section):
        super().__init__()
        self.layer = nn.Linear(4, 8)
        self.num_out = 8

    def forward(self, obs):
        if self.training and os.environ["RANK"] == "1":
            with torch.no_grad():
                self.layer.bias[0] += 1e-6
        return self.layer(obs[""])
"""


def test_ranks_whose_weights_differ_end(tmp_path):
    with ranks_in(tmp_path) as ranks:
        own = module(tmp_path, "drifting", DRIFTING)
        doors = ranks.start(*ASYNC, "model.name=drifting:Drifting", **own)
        assert [each.wait_exit(60) for each in doors] == [70, 70], [d.log for d in doors]
        told = "the weights of rank 1 differ from those of rank 0, first in "
        assert all(told in door.log for door in doors), [d.log for d in doors]


@contextmanager
def torchrun(folder, *flags, more=(), door="train"):
    """Two ranks of a door as users start them; the process of torchrun, and what all say."""
    run, log = folder / "run", folder / "log"
    starts = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*starts, *more, "-m", f"impala_async.{door}", "--run-dir", str(run), *flags]
    # Else a restart often finds no port.
    quiet = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, **ONE_THREAD, **quiet}
        )
    try:
        yield process, log
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


def test_torchrun_starts_ranks_that_come_to_the_goal(tmp_path):
    flags = ("--config", "cartpole_ddppo", "--set", "stop.mean_return=100")
    with torchrun(tmp_path, *flags) as (process, log):
        assert process.wait(120) == 0, log.read_text()
    run = tmp_path / "run"
    summaries = [json.loads((x / "summary.json").read_text()) for x in (run, run / "ranks" / "1")]
    assert {summary["exit_reason"] for summary in summaries} == {"mean_return"}
    # It is that of all.
    (reached,) = {summary["mean_return_100"] for summary in summaries}
    assert reached >= 100
    with torchrun(tmp_path, "--resume", "auto", *flags) as (process, log):
        assert process.wait(60) == 0, log.read_text()
    assert log.read_text().count("the run is over: stop.mean_return is 100") == 2


def test_torchrun_starts_all_again_where_one_is_killed_and_they_go_on(tmp_path):
    sites = [Site(tmp_path), Site(tmp_path)]
    sites[1].run_dir = sites[0].run_dir / "ranks" / "1"
    flags = ("--resume", "auto", *given(ASYNC))
    with torchrun(tmp_path, *flags, more=["--max-restarts=3"]) as (process, log):
        for site in sites:
            site.wait_report("training", lambda report: report["updates"] > 20)
        wait_until("checkpoints", lambda: all(site.checkpoints() for site in sites))
        killed = sites[1].service["pid"]
        before = sites[0].reports()[-1]["updates"]
        os.kill(killed, signal.SIGKILL)
        started = time.monotonic()
        for site in sites:
            site.wait_report("training again", lambda report: report["updates"] > before + 20)
        assert time.monotonic() - started < 40, log.read_text()
        assert {site.service["epoch"] for site in sites} == {2}
        assert all(identities_hold(report) for site in sites for report in site.reports())
        assert process.poll() is None
        learners = [psutil.Process(site.service["pid"]) for site in sites]
        process.kill()
        wait_until("the ranks end too", lambda: not any(map(is_alive, learners)))
        assert {site.summary["exit_reason"] for site in sites} == {"terminated"}


def began_at(site, epoch):
    """The updates with which a start began: what a checkpoint had, by its first report."""
    return next(r["updates"] for r in site.reports() if r["weights/version_epoch"] >= epoch)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("number", "times", "within_s"),
    [(signal.SIGKILL, 10, 15), (signal.SIGSTOP, 10, 60), (signal.SIGSTOP, 1, 60)],
    ids=["killed", "stopped", "stopped once"],
)
def test_ranks_train_again_each_time_and_no_actor_ends(number, times, within_s, tmp_path):
    """Learners of two ranks, and a host's actors, which stay. A rank that stands still is given up
    after `learner.stuck_end_s`; torchrun takes 30 s to end it."""
    site, took = Site(tmp_path), []
    flags = ("--resume", "auto", *given((*ASYNC, "learner.stuck_end_s=10", *ANY_PORTS)))
    more = [f"--max-restarts={times}"]
    with torchrun(tmp_path, *flags, more=more, door="learner"):
        fleet = site.open("actors", "--learner", str(site.run_dir), "--num", "4")

        def actors():
            return {child.pid for child in psutil.Process(fleet.process.pid).children()}

        try:
            for turn in range(times):
                before = site.reports()[-1]["updates"] if turn else 0
                site.wait_report("training", lambda r, n=before: r["updates"] > n + 50, within_s=60)
                where = Place(turn % 2, 2).folder(site.run_dir) / "service.json"
                at_work, service, lost = actors(), json.loads(where.read_text()), time.monotonic()
                os.kill(service["pid"], number)
                site.wait_report(
                    "training again",
                    lambda r, n=service["epoch"]: (
                        r["weights/version_epoch"] > n and r["updates"] > began_at(site, n + 1)
                    ),
                    within_s=2 * within_s,
                )
                took.append(time.monotonic() - lost)
                assert actors() == at_work
            fleet.ends()
        finally:
            print([f"{each:.1f} s" for each in took])
            site.close()
        assert max(took) < within_s
        assert all(identities_hold(report) for report in site.reports())
