"""Evaluations during real trainings: their goal, the best weights, and the end of their process."""

import json
import signal

import psutil
import pytest

from tests.e2e.harness import CARTPOLE, ENDLESS, given, is_alive, wait_until

pytestmark = pytest.mark.e2e
OFTEN = ("evaluate.every_s=0.3", "evaluate.episodes=4")


def family(door):
    children = psutil.Process(door.process.pid).children(recursive=True)
    evaluator = [each for each in children if "impala_async.evaluation.evaluator" in each.cmdline()]
    return children, evaluator


def test_a_run_ends_at_the_return_of_an_evaluation_and_its_best_weights_play_as_they_did(site):
    goal = ("stop.eval_return=300", "evaluate.actions=both")
    door = site.train(*ENDLESS, *OFTEN, *goal, config=CARTPOLE)
    assert door.wait_exit(90) == 0, door.log
    summary, last = site.summary, site.reports()[-1]
    assert summary["exit_reason"] == "eval_return"
    assert summary["best_eval_return"] == last["evaluate/best_return"] >= 300
    assert last["evaluate/greedy_return"] == summary["best_eval_return"]
    assert 0 < last["evaluate/sampled_return"] <= 500
    assert 0 < last["evaluate/env_steps"] <= summary["env_steps_trained"]
    (best,) = (site.run_dir / "best").iterdir()
    assert summary["best_checkpoint"] == f"best/{best.name}"
    assert f"({summary['best_checkpoint']})" in door.log
    # In another process, with the same seeds: the same return, to the last bit.
    for path in (best, best.parent):
        again = site.open("evaluate", str(path), "--episodes", "4", "--json")
        assert again.wait_exit(30) == 0, again.log
        found = json.loads(again.log)
        assert found["mean_return"] == summary["best_eval_return"]
        assert found["checkpoint"] == str(best)
        assert found["env_steps_trained"] == last["evaluate/env_steps"]
    over = site.open("train", "--resume", "--run-dir", str(site.run_dir))
    assert over.wait_exit(30) == 0
    assert "the run is over: stop.eval_return is 300, and it came to" in over.log


def test_the_death_of_the_process_that_evaluates_ends_no_run_and_it_ends_with_it(site):
    door = site.train(*ENDLESS, *OFTEN, config=CARTPOLE)
    site.wait_report("an evaluation", lambda r: r["evaluate/count"] > 0)
    _, (evaluator,) = family(door)
    evaluator.kill()
    wait_until("it is told", lambda: "the process that evaluates was killed" in door.log)
    # One that had ended may still be on its way into a report.
    (other,) = wait_until("another one", lambda: family(door)[1])
    assert other.pid != evaluator.pid
    count = site.reports()[-1]["evaluate/count"]
    site.wait_report("a further evaluation", lambda r: r["evaluate/count"] > count + 1)
    children, _ = family(door)
    door.kill()
    wait_until("all have ended", lambda: not any(map(is_alive, children)), within_s=4.0)


def test_seeds_are_trained_one_after_the_other_and_drawn_in_one_picture(site):
    flags = ("--config", CARTPOLE, "--seeds", "3-4", "--run-dir", str(site.run_dir))
    short = ("stop.mean_return=none", "stop.updates=60", *OFTEN)
    door = site.open("train", *flags, *given(short))
    assert door.wait_exit(60) == 0, door.log
    for seed in (3, 4):
        summary = json.loads((site.run_dir / f"seed-{seed}" / "summary.json").read_text())
        assert (summary["seed"], summary["exit_reason"]) == (seed, "updates")
        assert f"\n{seed}     updates  " in door.log
    assert (site.run_dir / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_ctrl_c_ends_the_seeds_that_are_to_come_too(site):
    flags = ("--config", CARTPOLE, "--seeds", "0-1", "--run-dir", str(site.run_dir))
    door = site.open("train", *flags, *given((*ENDLESS, "stop.env_steps=1_000_000_000")))
    wait_until("training", (site.run_dir / "seed-0/metrics.jsonl").exists)
    door.ends(signal.SIGINT, 130)
    assert "\n0     interrupted  " in door.log
    assert not (site.run_dir / "seed-1").exists()
