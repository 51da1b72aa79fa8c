"""Env workers under real actors: faults, and ends."""

import time

import psutil
import pytest

from tests.e2e.harness import wait_until

pytestmark = pytest.mark.e2e
PARALLEL = ("actor.sampler=parallel", "actor.num_workers=2")
CARTPOLE = "env.id=CartPole-v1"


def workers_of(actor):
    """The children that an actor has now."""
    return psutil.Process(actor.process.pid).children()


def test_workers_end_with_their_actor_and_it_ends_with_any_of_them(site):
    site.learner(CARTPOLE, *PARALLEL)
    actor = site.actor()
    site.wait_report("it trains", lambda r: r["updates"] > 3)
    first, second = workers_of(actor)
    first.kill()
    error = actor.fails(2)
    assert "the env worker of environments 0 to 3 of CartPole-v1 was killed (SIGKILL)" in error
    wait_until("its sibling is gone", lambda: not second.is_running())
    actor = site.actor()
    site.wait_report("the next one trains", lambda r: r["num_actors"] == 1 and r["updates"] > 6)
    workers = workers_of(actor)
    assert len(workers) == 2
    actor.kill()
    wait_until("its workers are gone", lambda: not any(w.is_running() for w in workers))


def test_a_hanging_environment_holds_no_end_up(site):
    site.learner("env.id=tests.actor.worlds:Hanging", "env.kwargs={after=100}", *PARALLEL)
    actor = site.actor()
    site.wait_report("it trained", lambda r: r["updates"] > 0)
    workers = workers_of(actor)
    site.wait_report("it hangs", lambda r: r["env_steps_per_s"] == 0)
    told_at = time.monotonic()
    actor.ends()
    assert time.monotonic() - told_at < 4
    assert "Traceback" not in actor.log
    assert not any(worker.is_running() for worker in workers)
