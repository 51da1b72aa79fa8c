import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from bench.probes import Counting, Probe
from impala_async import output
from impala_async.actor import service as service_module
from impala_async.actor.client import NewRun
from impala_async.actor.service import ActorService, seed_of
from impala_async.envs.faults import Watch
from impala_async.errors import EnvError, MismatchError
from impala_async.policy import Policy
from impala_async.processes import signals_kept
from impala_async.trajectory import columns_over
from impala_async.weights import Version, Weights
from impala_async.wire import messages as wire
from tests.actor.scripted import WITHIN_S, Session, body_of, settings_for, settings_of
from tests.actor.worlds import section
from tests.wire.ends import until

MANY = 1000
FIRST = Version(1, 1)
NETWORKS = settings_for("Counting")


@pytest.fixture(autouse=True)
def signals():
    """A service takes over the signals of its process, which here is pytest's."""
    with signals_kept():
        yield


@pytest.fixture
def closed(monkeypatch):
    """The environments that were closed; their own close fails, as that of a broken one may."""
    environments = []

    def close(env):
        environments.append(env)
        raise RuntimeError("not even that")

    monkeypatch.setattr(Probe, "close", close)
    return environments


def welcomed(scene, settings, **welcome):
    hello = scene.learner.data.hear(wire.Hello)
    answered = scene.learner.welcome(hello, settings, **welcome)
    return Session(scene.learner.data.hear(wire.Spec), answered)


def give_weights(scene, session, settings, version=FIRST):
    """All zero: then every action is as likely as any other."""
    layout = Policy(session.schema, settings.model, seed=0).layout
    assert layout.digest == session.spec.layout_digest
    weights = Weights(version, np.zeros(layout.num_bytes, np.uint8))
    reply = wire.WeightsReply(*version, layout.digest, weights.digest())
    asked = scene.learner.weights.find(wire.Get)
    while asked.message.session != session.id:
        # An actor that was here before asked twice.
        asked = scene.learner.weights.find(wire.Get)
    asked.answer(reply, weights.buffer.tobytes())


def at_work(scene, settings, version=FIRST, **welcome):
    """The learner's side, up to the first weights, with all the credit that it may want."""
    session = welcomed(scene, settings, **welcome)
    session.grant(MANY)
    give_weights(scene, session, settings, version)
    return session


def run(scene, serve, **more):
    """The service on this thread, the learner on another; exit code and what the learner saw."""
    settings = {"num_envs": 2, "connect_s": WITHIN_S, "start": (wire.NO_NUMBER, 0, 0), **more}
    service = ActorService(scene.learner.url, **settings)
    with ThreadPoolExecutor(1) as thread:
        served = thread.submit(serve, scene)
        try:
            return service.run(), served.result(WITHIN_S)
        finally:
            served.result(WITHIN_S)


def finish(scene, session):
    session.bye("finished")
    scene.learner.data.find(wire.ByeOk)


def play(settings, num_messages=3, version=FIRST, **welcome):
    """Welcome an actor, take a few messages, finish; Spec and what was sent."""

    def serve(scene):
        session = at_work(scene, settings, version, **welcome)
        messages = []
        for seq in range(num_messages):
            messages.append(scene.learner.data.hear(wire.Data))
            session.grant(MANY, settled=seq + 1)
        finish(scene, session)
        return session, messages

    return serve


def test_an_actor_works_until_the_learner_is_finished(scene):
    code, (session, messages) = run(scene, play(settings_for("Counting"), number=5))
    assert code == 0
    assert (session.spec.columns, session.spec.streams) == (2, 1)
    assert [heard.message.seq for heard in messages] == [0, 1, 2]
    assert {heard.message.update for heard in messages} == {1}
    # Counting shows (column, episode, step): rows 0-3 of both columns, from the beginning.
    sizes = wire.body_sizes(session.schema.layout, 2, 0)
    planes = np.frombuffer(body_of(messages[0])[: sizes.obs + sizes.small], np.uint8)
    columns = columns_over(
        session.schema,
        planes[: sizes.obs].reshape(2, -1).copy(),
        planes[sizes.obs :].reshape(2, -1).copy(),
    )
    assert columns.obs[""][:, :, 2].tolist() == [[0, 1, 2, 3, 0]] * 2


def test_columns_that_do_not_complete_together_are_streams(scene):
    settings = settings_for("CountingVector", autoreset="SameStep")
    _, (session, messages) = run(scene, play(settings, num_messages=6), num_envs=3)
    assert (session.spec.columns, session.spec.streams) == (1, 3)
    assert {heard.message.columns for heard in messages} == {1}


def changed(settings, **sections):
    """Settings with other keys in some of their sections."""
    update = {
        name: getattr(settings, name).model_copy(update=keys) for name, keys in sections.items()
    }
    return settings.model_copy(update=update)


def refusal(scene, settings, error=MismatchError, **more):
    """The error that ends an actor which cannot do what it is welcomed for."""

    def serve(scene):
        scene.learner.welcome(scene.learner.data.hear(wire.Hello), settings)
        scene.learner.data.hear(wire.Bye)

    with pytest.raises(error) as caught:
        run(scene, serve, **more)
    assert str(caught.value).isprintable()
    return caught.value


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (settings_of("no_such_package:Env"), "no_such_package"),
        # It cannot write to the terminal.
        (settings_of("Foo\n\x1b[31mBar-v1"), "Bar-v1"),
        (changed(NETWORKS, model={"name": "nature_cnn"}), "model.name nature_cnn wants an image"),
        # A learner that is none asks for what it does not need to build.
        (changed(NETWORKS, model={"hidden_sizes": (2**62,)}), "model: there is no memory here"),
    ],
)
def test_what_cannot_be_built_here_does_not_fit(scene, settings, says):
    error = refusal(scene, settings)
    assert error.exit_code == 78
    assert says in str(error)


def test_an_env_worker_that_dies_at_its_start_may_live_on_a_second_try(scene):
    settings = changed(settings_of("tests.actor.worlds:Unborn"), actor={"sampler": "parallel"})
    error = refusal(scene, settings, EnvError)
    assert re.search(r"the env worker of .* was killed \(SIGKILL\)", str(error))
    # `train` starts it again, unlike one that does not fit.
    assert error.exit_code == 2


@pytest.mark.parametrize("how", ["ValueError", "SystemExit", "KeyboardInterrupt"])
def test_an_environment_that_raises_ends_the_actor_with_its_name(scene, closed, caplog, how):
    env = section("Quitting", kwargs={"how": how, "after": 6})
    says = f":Quitting failed in step: {how}"
    settings = settings_for("Counting").model_copy(update={"env": env})

    def serve(scene):
        session = at_work(scene, settings)
        bye = scene.learner.data.find(wire.Bye).message
        assert bye.session == session.id
        return bye.text

    service = []
    with pytest.raises(EnvError, match=says) as caught:
        run(scene, lambda scene: service.append(serve(scene)))
    assert service[0].startswith("EnvError: ")
    assert says in service[0]
    assert caught.value.exit_code == 2
    assert len(str(caught.value).splitlines()) == 1
    assert len(closed) == 2
    assert "Traceback" in caplog.text, "where it failed is told"


def test_a_close_that_hangs_behind_a_fault_is_ended_and_tells_both(scene, monkeypatch):
    ended = []
    monkeypatch.setattr(service_module, "Watch", partial(Watch, end=ended.append))
    monkeypatch.setattr(service_module, "CLOSE_S", 0.1)
    monkeypatch.setattr(Probe, "close", lambda env: until(lambda: ended))
    env = section("Quitting", kwargs={"how": "ValueError", "after": 6})
    settings = settings_for("Counting").model_copy(update={"env": env})

    def serve(scene):
        at_work(scene, settings)
        scene.learner.data.find(wire.Bye)

    with pytest.raises(EnvError):
        run(scene, serve)
    assert re.search(r"in close, after this: .*:Quitting failed in step: ValueError", ended[0])


def test_a_run_with_new_settings_is_built_anew(scene, closed, caplog):
    caplog.set_level("INFO")
    first, second = settings_for("Slow", step_s=0.001), settings_for("Endless", rows=6)

    def serve(scene):
        session = at_work(scene, first)
        sent = [scene.learner.data.hear(wire.Data).message for _ in range(3)]
        session.grant(MANY, settled=1)
        session.reject("hello_again")
        scene.learner.welcome(scene.learner.data.find(wire.Hello), second)
        # All that it holds will never come; the learner may have taken some of that, above a gap.
        hello = scene.learner.data.find(wire.Hello)
        held_from = hello.message.lowest_unsettled
        welcome = scene.learner.welcome(hello, second)
        again = Session(scene.learner.data.find(wire.Spec), welcome)
        again.grant(MANY, settled=held_from)
        give_weights(scene, again, second)
        sent.append(scene.learner.data.hear(wire.Data).message)
        assert len(closed) == 2
        finish(scene, again)
        return held_from, sent

    code, (held_from, sent) = run(scene, serve)
    assert code == 0
    assert held_from >= 3
    shapes = [(data.seq, data.rows) for data in sent]
    assert shapes == [(0, 4), (1, 4), (2, 4), (held_from, 6)]
    (told,) = (each for each in caplog.messages if "are given up" in each)
    assert told == f"other settings: {held_from - 1} trajectories are given up"
    assert len(closed) == 4


def test_another_run_is_left_to_a_new_process(scene, closed):
    byes = []

    def serve(scene):
        session = at_work(scene, NETWORKS)
        scene.learner.run_id = b"another run here"
        session.reject("hello_again")
        scene.learner.welcome(scene.learner.data.find(wire.Hello), NETWORKS)
        byes.append(scene.learner.data.find(wire.Bye).message)

    with pytest.raises(NewRun):
        run(scene, serve)
    assert [bye.text for bye in byes] == [""], "it died of nothing"
    assert len(closed) == 2


def test_who_built_for_so_long_that_its_session_is_over_comes_in_with_what_it_built(
    scene, closed, caplog
):
    caplog.set_level("INFO")
    settings = settings_for("Counting")

    def serve(scene):
        welcomed(scene, settings, number=0).reject("hello_again")
        # Its number is another's by now.
        again = scene.welcome_back(settings, number=3)
        again.grant(MANY)
        give_weights(scene, again, settings)
        seq = scene.learner.data.hear(wire.Data).message.seq
        finish(scene, again)
        return seq

    assert run(scene, serve) == (0, 0)
    assert len(closed) == 2
    # It says so of the number that it has, from which its seed comes too.
    assert "actor 3: 2 environments" in caplog.text
    assert "actor 0" not in caplog.text
    warnings = [each for each in caplog.records if each.levelname == "WARNING"]
    assert all("failed in close" in each.message for each in warnings)


def test_where_the_time_goes_is_told(scene, monkeypatch):
    monkeypatch.setattr(service_module, "TIMERS_EVERY_S", 0.05)
    settings = settings_for("Slow", rows=10, sampler="serial", step_s=0.002)

    def serve(scene):
        session = at_work(scene, settings, heartbeat_s=0.05)
        for seq in range(5):
            scene.learner.data.hear(wire.Data)
            session.grant(MANY, settled=seq + 1)
        while not (timers := scene.learner.weights.find(wire.Heartbeat).message.timers):
            pass
        finish(scene, session)
        return dict(timers)

    _, timers = run(scene, serve)
    names = "env_time_ms act_time_ms send_wait_ms weights_wait_ms agents_per_step"
    assert timers.keys() == set(names.split())
    assert timers["agents_per_step"] == 1
    # Ten steps of two environments, two milliseconds each, make a trajectory.
    assert 36 < timers["env_time_ms"] < 400
    assert timers["act_time_ms"] > 0


# Sixteen steps take four seconds. Eight environments make one of 0.4 s: it must look after each.
@pytest.mark.parametrize(("who", "num_envs", "step_s"), [("learner", 1, 0.25), ("signal", 8, 0.05)])
def test_an_end_comes_soon_in_the_midst_of_slow_steps(scene, who, num_envs, step_s):
    own = {"sampler": "serial"} if who == "signal" else {}
    settings = settings_for("Slow", rows=1000, step_s=step_s, **own)

    def serve(scene):
        session = at_work(scene, settings, heartbeat_s=0.05)
        for _ in range(5):
            scene.learner.weights.find(wire.Heartbeat)
        told_at = time.monotonic()
        if who == "learner":
            finish(scene, session)
        else:
            os.kill(os.getpid(), signal.SIGTERM)
            bye = scene.learner.data.find(wire.Bye)
            bye.answer(wire.ByeOk(session.id))
            assert bye.message.session == session.id
        return time.monotonic() - told_at

    code, took_s = run(scene, serve, num_envs=num_envs)
    assert (code, took_s < (2.0 if who == "learner" else 3.0)) == (0, True)


def test_what_fails_after_a_signal_may_have_been_told_to_end_as_well(scene, monkeypatch):
    def step(env, action):
        os.kill(os.getpid(), signal.SIGTERM)
        raise EOFError("its simulator is gone")

    monkeypatch.setattr(Counting, "step", step)

    def serve(scene):
        session = at_work(scene, settings_for("Counting", sampler="serial"))
        scene.learner.data.find(wire.Bye).answer(wire.ByeOk(session.id))

    assert run(scene, serve)[0] == 0


def test_seeds_are_stable_and_no_two_actors_share_one():
    assert [seed_of(0, 0), seed_of(0, 1), seed_of(1, 0)] == [1484405855, 1982462498, 917752063]
    runs = [(run_seed, number) for run_seed in range(5) for number in range(200)]
    later = [(0, number, epoch, 3) for number in range(10) for epoch in range(2, 12)]
    begun = [(0, number, 2, begins_at) for number in range(10) for begins_at in range(10)]
    again = [(0, number, 1, 0, life) for number in range(10) for life in range(1, 11)]
    seeds = {words: seed_of(*words) for words in (*runs, *later, *begun, *again)}
    assert len({*seeds.values()}) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds.values())
    assert seed_of(0, 1, epoch=1, begins_at=0, life=0) == 1982462498


@pytest.mark.parametrize("mode", ["async", "lockstep"])
def test_seed_number_and_beginning_decide_what_an_actor_does(scene, mode):
    """Each first message is acted with weights of zero, whatever their version."""

    def sent(seed=0, number=1, epoch=1, update=0):
        settings = settings_for("MatchObservation", rows=20, seed=seed)
        settings = changed(settings, pace={"mode": mode})
        serve = play(settings, 1, version=Version(epoch, update), number=number, epoch=epoch)
        _, (_, (first,)) = run(scene, serve, num_envs=None)
        assert first.message.update == update
        return body_of(first)

    reference, resumed = sent(), sent(epoch=2, update=40)
    assert sent() == reference
    assert sent(epoch=2, update=40) == resumed
    others = [sent(number=0), sent(seed=1), sent(epoch=3, update=40)]
    assert len({reference, resumed, *others}) == 5
    # Where numbers are given out again, and the first version is decided, it is one more seed.
    assert (sent(epoch=2, update=41) == resumed) == (mode == "async")


def test_a_learner_is_heard_while_an_environment_of_a_worker_hangs(scene):
    hanging = {"id": "tests.actor.worlds:Hanging"}
    settings = changed(settings_for("Counting", rows=4, sampler="parallel"), env=hanging)
    code, _ = run(scene, play(settings, num_messages=0))
    assert code == 0


def test_a_network_that_takes_long_to_build_is_told_of(scene, monkeypatch, caplog):
    build, told = service_module.build_policy, "the network is being built (0 s)"

    def slowly(*args, **how):
        until(lambda: told in caplog.text)
        return build(*args, **how)

    monkeypatch.setattr(output, "Wait", partial(output.Wait, after_s=0.0))
    monkeypatch.setattr(service_module, "build_policy", slowly)
    run(scene, play(settings_for("Counting", sampler="serial"), 1))
    assert told in caplog.text


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_it_acts_in_the_precision_of_the_run(scene, precision, caplog):
    caplog.set_level("INFO")
    settings = changed(settings_for("Counting"), model={"precision": precision})
    run(scene, play(settings, 1))
    assert f"actor 3: 2 environments of bench.probes:Counting, acting in {precision}" in caplog.text
