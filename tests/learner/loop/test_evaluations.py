"""Evaluations beside a loop: real processes play, and the best weights stay in a folder."""

import asyncio
import logging
import os
import shutil
import time
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from bench.probes import ActionReward
from impala_async.config.evaluate import EvaluateSection
from impala_async.learner.handoff import Captured, Progress
from impala_async.learner.loop import evaluations as module
from impala_async.learner.loop.evaluations import Evaluations
from impala_async.learner.loop.reporter import EpisodeStats
from impala_async.learner.loop.saver import Saver
from impala_async.runs.folder import RunFolder
from impala_async.training.checkpoint import TrainingState, open_checkpoint
from impala_async.weights import Lineage
from tests.evaluation.test_evaluator import REWARD, config_for, weights_for
from tests.learner.hand_actor import until
from tests.metrics.test_sinks import file_size_limit


def saver_for(folder, **evaluate):
    return Saver(
        folder=folder,
        keep=3,
        accounts=lambda: {"ledger": {}, "watermarks": {}},
        lineage=Lineage(1),
        episodes=EpisodeStats(),
        run_s=lambda: 1.0,
        evaluate=EvaluateSection(**evaluate),
    )


class Learning:
    """Gives the weights of now when it is asked for some, as a learner thread does."""

    def __init__(self, path, config):
        self.config = config
        self.folder = RunFolder(path)
        self.folder.begin(config)
        self.folder.confirm(config)
        self.returns, self.num_asked, self.captured = [], 0, None
        self.evaluations = Evaluations(
            config.evaluate,
            saver_for(self.folder, **config.evaluate.model_dump()),
            ask=self._ask,
            on_return=self.returns.append,
        )

    def learn(self, update, bias):
        tensors = {"model": weights_for(self.config, bias)}
        progress = Progress(1, update, 10 * update)
        self.captured = Captured(progress, TrainingState(tensors, {"optimizer": {}}))

    def _ask(self):
        self.num_asked += 1
        asyncio.get_running_loop().call_soon(self.evaluations.take, self.captured)

    async def returned(self, number):
        await until(lambda: len(self.returns) >= number, "a return")
        return self.returns[-1]

    def kept(self):
        return sorted(path.name for path in self.folder.best.glob("*"))


@asynccontextmanager
async def learning(path, env_id=REWARD, **evaluate):
    opened = Learning(path, config_for(env_id, every_s=0.02, episodes=4, **evaluate))
    opened.learn(1, 9.0)
    task = asyncio.create_task(opened.evaluations.run())
    try:
        yield opened, task
    finally:
        task.cancel()
        await asyncio.wait([task])
        opened.evaluations.close()


def evaluators():
    children = psutil.Process().children()
    alive = [each for each in children if each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in alive if "impala_async.evaluation.evaluator" in each.cmdline()]


async def test_the_best_weights_stay_and_no_weights_are_evaluated_twice(tmp_path):
    async with learning(tmp_path) as (learner, _):
        learner.learn(1, -9.0)
        assert await learner.returned(1) == 0.0
        (process,) = evaluators()
        assert learner.kept() == ["ckpt-1-1"]
        learner.learn(2, 9.0)
        assert await learner.returned(2) == 1.0
        learner.learn(3, 9.0)
        await learner.returned(3)
        learner.learn(4, -9.0)
        assert await learner.returned(4) == 0.0
        num_asked = learner.num_asked
        await until(lambda: learner.num_asked > num_asked + 2, "further requests")
        assert len(learner.returns) == 4
        assert evaluators() == [process]
        assert learner.kept() == ["ckpt-1-2"]
        report = learner.evaluations.report()
        assert report.pop("evaluate/took_s") > 0
        assert report == {
            "evaluate/greedy_return": 0.0,
            "evaluate/sampled_return": None,
            "evaluate/env_steps": 40,
            "evaluate/best_return": 1.0,
            "evaluate/count": 4,
        }
        best = open_checkpoint(learner.folder.best / "ckpt-1-2")
        assert best.state["env_steps_trained"] == 20
        assert best.tensors["model"].keys() == learner.captured.training.tensors["model"].keys()
    assert evaluators() == []
    # A resumed run goes on from there, whether it finds another checkpoint or not.
    best_of_all = 1.0, "best/ckpt-1-2", "greedy"
    for evaluate in {}, {"every_s": 1.0}, {"every_s": 1.0, "actions": "both"}:
        assert saver_for(learner.folder, **evaluate).best_evaluated == best_of_all


async def test_returns_of_other_actions_are_not_compared_with_after_a_resume(tmp_path):
    async with learning(tmp_path) as (learner, _):
        await learner.returned(1)
    learner.folder.let_go()
    async with learning(tmp_path, actions="sampled") as (learner, _):
        assert learner.evaluations.report()["evaluate/best_return"] is None
        learner.learn(2, -9.0)
        assert await learner.returned(1) == 0.0
        assert learner.kept() == ["ckpt-1-2"]


class SlowToClose(ActionReward):
    """Four of them take longer than a second to close, as simulators do."""

    def close(self):
        time.sleep(0.4)
        print("closed", flush=True)


async def test_its_environments_are_closed_at_the_end(tmp_path):
    async with learning(tmp_path, f"{__name__}:SlowToClose") as (learner, _):
        await learner.returned(1)
    assert (learner.folder.path / "evaluator.log").read_text().count("closed") == 4


@pytest.mark.parametrize("num_done", [0, 1])
async def test_a_start_that_ends_before_an_evaluation_is_finished_says_so(
    num_done, tmp_path, caplog
):
    async with learning(tmp_path) as (learner, _):
        await until(evaluators, "its process")
        while len(learner.returns) < num_done:
            await asyncio.sleep(module.POLL_S)
    assert ("no evaluation was finished in this start" in caplog.text) == (not num_done)


async def test_a_process_that_dies_is_told_of_and_another_one_goes_on(tmp_path, caplog):
    async with learning(tmp_path) as (learner, _):
        await learner.returned(1)
        (process,) = evaluators()
        process.kill()
        await until(lambda: not evaluators(), "its end")
        learner.learn(2, -9.0)
        await until(lambda: "the process that evaluates was killed (SIGKILL)" in caplog.text, "it")
        learner.learn(3, -9.0)
        assert await learner.returned(2) == 0.0
        assert evaluators() != [process]
    assert caplog.text.count("training goes on, and another one is started") == 1


async def test_one_that_is_stopped_is_told_of_once_and_goes_on_later(tmp_path, caplog, monkeypatch):
    async with learning(tmp_path) as (learner, _):
        await learner.returned(1)
        monkeypatch.setattr(module, "SILENT_S", 0.2)
        (process,) = evaluators()
        process.suspend()
        learner.learn(2, -9.0)
        told = f"the process that evaluates ({process.pid}) has said nothing for"
        await until(lambda: told in caplog.text, "a word of it")
        await asyncio.sleep(5 * module.POLL_S)
        process.resume()
        assert await learner.returned(2) == 0.0
        assert evaluators() == [process]
    assert caplog.text.count(told) == 1


async def test_after_some_deaths_in_a_row_no_other_process_is_started(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(module, "MOST_DEATHS", 2)
    failing = "tests.evaluation.test_evaluator:failing"
    async with learning(tmp_path, failing) as (learner, task):
        await until(lambda: "another one is started" in caplog.text, "the first death")
        learner.learn(2, 9.0)
        await asyncio.wait([task])
        assert task.exception() is None
    said = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert ["the sun is out" in record.message for record in said] == [True, True]
    assert said[-1].message.endswith("after 2 in a row there are no further evaluations")
    assert "in this start" not in caplog.text, "the run goes on"
    assert learner.returns == learner.kept() == []


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
async def test_what_cannot_be_started_is_told_as_a_death(make, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(module, "MOST_DEATHS", 1)
    async with learning(tmp_path / "run") as (learner, task):
        num_open = len(os.listdir("/proc/self/fd"))
        make(learner.folder.path / module.LOG)
        await asyncio.wait([task])
        told = "the process that evaluates cannot be started: [Errno 22] it is no regular file"
        assert told in caplog.text
    assert len(os.listdir("/proc/self/fd")) == num_open


async def test_weights_that_a_limit_of_files_does_not_let_through_are_told_of(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(module, "MOST_DEATHS", 1)
    async with learning(tmp_path) as (_, task):
        with file_size_limit(64):
            await asyncio.wait([task])
    says = "the process that evaluates cannot be given weights: [Errno 27] File too large: training"
    assert caplog.text.count(says) == 1


async def test_best_weights_that_the_disk_does_not_take_are_told_and_tried_again(tmp_path, caplog):
    async with learning(tmp_path) as (learner, _):
        learner.folder.best.touch()
        await learner.returned(1)
        assert "the best weights so far are not kept: cannot write checkpoint" in caplog.text
        assert learner.evaluations.report()["evaluate/best_return"] is None
        learner.folder.best.unlink()
        learner.learn(2, 9.0)
        await learner.returned(2)
        assert learner.kept() == ["ckpt-1-2"]


async def test_best_weights_that_somebody_removes_are_followed_by_the_next(tmp_path):
    async with learning(tmp_path) as (learner, _):
        learner.learn(1, 9.0)
        assert await learner.returned(1) == 1.0
        shutil.rmtree(learner.folder.best)
        assert learner.evaluations.report()["evaluate/best_return"] is None
        learner.learn(2, -9.0)
        assert await learner.returned(2) == 0.0
        assert learner.kept() == ["ckpt-1-2"]
        assert learner.evaluations.report()["evaluate/best_return"] == 0.0


async def test_without_a_time_nothing_is_evaluated(tmp_path):
    config = config_for(REWARD)
    config = config.model_copy(update={"evaluate": type(config.evaluate)()})
    learner = Learning(tmp_path, config)
    await learner.evaluations.run()
    assert learner.num_asked == 0
    assert {*learner.evaluations.report().values()} == {None, 0}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
