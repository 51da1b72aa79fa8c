"""What goes through an exchange, and what it answers itself."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from impala_async.relay.exchange import MAX_ACTORS
from impala_async.weights import NO_VERSION, Version
from impala_async.wire.messages import (
    PROTOCOL,
    REJECT_CODES,
    WRONG_PORT,
    Bye,
    Data,
    Get,
    Grant,
    Heartbeat,
    Hello,
    NotModified,
    Reject,
    Spec,
    WeightsReply,
    pack,
    unpack,
)
from impala_async.wire.session import FULL_RETRY_S
from impala_async.wire.sockets import Dealer
from tests.actor.scripted import reply_of as reply_with
from tests.actor.scripted import settings_of, weights_of
from tests.relay.stage import WITHIN_S, ByHand, Stage
from tests.wire.ends import until

V1, V2 = Version(1, 1), Version(1, 2)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    opened = Stage(tmp_path)
    yield opened
    opened.close()


def reply_of(version: Version) -> tuple[WeightsReply, bytes]:
    return reply_with(weights_of(float(version.update), version))


def test_all_goes_up_and_down_as_it_is(stage: Stage) -> None:
    actor = ByHand(stage, 1)
    welcome, hello = actor.join()
    assert (welcome.weights_port, welcome.nonce) == (stage.weights.port, stage.link.nonce)
    spec = Spec(actor.session, b"s" * 16, b"l" * 16, 2, 1)
    actor.say(spec, b"a schema")
    heard = stage.learner.data.hear(Spec)
    assert (heard.message, heard.frames, heard.route) == (spec, [b"a schema"], hello.route)
    data = Data(actor.session, 0, 1, 1, 5, 2, 0, 0, None)
    obs, small = b"o" * 300_000, b"s" * 100
    actor.say(data, obs, small)
    heard = stage.learner.data.hear(Data)
    assert (heard.message, heard.frames) == (data, [obs, small])
    grant = Grant(actor.session, 3, 1, 1, 7, [[0, 2]])
    heard.answer(grant)
    assert actor.hear() == (grant, [])
    actor.say(Heartbeat(actor.session, {"env_time_ms": 1.5}), to=actor.weights)
    beat = stage.learner.weights.hear(Heartbeat)
    assert beat.message.timers == {"env_time_ms": 1.5}
    beat.answer(grant)
    assert actor.hear(actor.weights) == (grant, [])


def test_an_actor_of_this_host_goes_on_over_ipc(stage: Stage) -> None:
    actor = ByHand(stage, 1)
    welcome, hello = actor.join()
    assert Path(welcome.nonce_path).read_bytes() == welcome.nonce
    actor.data.close()
    actor.data = stage.dial_url(f"ipc://{welcome.ipc_data}")
    actor.weights = stage.dial_url(f"ipc://{welcome.ipc_weights}")
    actor.say(Spec(actor.session, b"s" * 16, b"l" * 16, 2, 1), b"a schema")
    heard = stage.learner.data.hear(Spec)
    assert heard.route == hello.route
    grant = Grant(actor.session, 1, 0, 1, 1, [])
    heard.answer(grant)
    assert actor.hear()[0] == grant
    actor.pull(NO_VERSION)
    stage.learner.weights.hear(Get).answer(*reply_of(V1))
    assert actor.hear(actor.weights)[0].update == 1


def test_each_answer_comes_to_the_actor_that_it_is_for(stage: Stage) -> None:
    actors = stage.crew(3)
    for actor in actors:
        actor.say(Heartbeat(actor.session, {}), to=actor.weights)
    for _ in actors:
        beat = stage.learner.weights.hear(Heartbeat)
        beat.answer(Grant(beat.message.session, 1, 0, 1, 1, []))
    for actor in actors:
        assert actor.hear(actor.weights)[0].session == actor.session
    # A refusal does not even say whom it is for.
    actors[1].say(Heartbeat(actors[1].session, {}), to=actors[1].weights)
    stage.learner.weights.hear(Heartbeat).answer(Reject(0, "over", 0.0))
    assert actors[1].hear(actors[1].weights)[0] == Reject(0, "over", 0.0)


def test_many_pulls_are_one_and_later_ones_are_none(stage: Stage) -> None:
    actors = stage.crew(3)
    for actor in actors[:2]:
        actor.pull(NO_VERSION)
    get = stage.learner.weights.hear(Get)
    until(lambda: stage.exchange.counts.up >= 4)
    get.answer(*reply_of(V1))
    for actor in actors[:2]:
        reply, (buffer,) = actor.hear(actor.weights)
        assert (Version(reply.epoch, reply.update), buffer) == (V1, reply_of(V1)[1])
    actors[2].pull(NO_VERSION)
    assert actors[2].hear(actors[2].weights)[0].update == 1
    assert (stage.exchange.counts.served, stage.exchange.counts.fetched) == (3, 1)
    # Whoever has it is told of the next only by the learner.
    actors[0].pull(V1)
    get = stage.learner.weights.hear(Get)
    assert get.message == Get(actors[0].session, *V1)
    get.answer(NotModified(*V1))
    assert actors[0].hear(actors[0].weights)[0] == NotModified(*V1)


def test_a_pull_of_one_that_is_refused_or_gone_goes_to_the_next(stage: Stage) -> None:
    first, second, third = stage.crew(3)
    first.pull(V1)
    get = stage.learner.weights.hear(Get)
    for number, actor in ((2, second), (3, third)):
        actor.pull(V1)
        until(lambda number=number: len(stage.exchange._shelf._waiting) == number)
    get.answer(Reject(REJECT_CODES.index("hello_again"), "over", 0.0))
    assert isinstance(first.hear(first.weights)[0], Reject)
    get = stage.learner.weights.hear(Get)
    assert get.message.session == second.session
    # It comes back, with a session that has not asked.
    second.data = stage.dial(stage.data)
    second.join()
    get = stage.learner.weights.hear(Get)
    assert get.message.session == third.session
    get.answer(*reply_of(V2))
    assert third.hear(third.weights)[0].update == 2


def test_weights_of_another_start_are_not_served(stage: Stage) -> None:
    (actor,) = stage.crew(1)
    actor.pull(NO_VERSION)
    stage.learner.weights.hear(Get).answer(*reply_of(Version(1, 90)))
    assert actor.hear(actor.weights)[0].update == 90
    late = ByHand(stage, 9)
    late.join(epoch=2)
    late.pull(Version(1, 80))
    get = stage.learner.weights.hear(Get)
    get.answer(*reply_of(Version(2, 81)))
    assert late.hear(late.weights)[0][:2] == (2, 81)


def test_in_lockstep_each_pull_is_its_own(stage: Stage) -> None:
    actors = stage.crew(2, settings={"pace": {"mode": "lockstep"}})
    for update in (1, 2):
        for actor in actors:
            actor.pull(Version(1, update - 1))
            get = stage.learner.weights.hear(Get)
            assert get.message.session == actor.session
            get.answer(*reply_of(Version(1, update)))
            assert actor.hear(actor.weights)[0].update == update
    assert (stage.exchange.counts.served, stage.exchange.counts.fetched) == (4, 4)


def test_who_is_not_known_here_must_say_hello_again(stage: Stage) -> None:
    actor = ByHand(stage, 1)
    stranger = b"?" * 16
    for message, end in (
        (Bye(stranger, 2), actor.data),
        (Heartbeat(stranger, {}), actor.weights),
        (NotModified(1, 1), actor.weights),
    ):
        actor.say(message, to=end)
        refusal, _ = actor.hear(end)
        assert REJECT_CODES[refusal.code] == "hello_again"
    assert stage.is_quiet()


def test_what_is_no_message_is_counted_and_its_sender_told(stage: Stage) -> None:
    (actor,) = stage.crew(1)
    for garbage, reason in ((b"", "malformed"), (b"\xc1", "malformed"), (b"\x91\x7f", "unknown")):
        for end in (actor.data, actor.weights):
            actor.say(garbage, b"more", to=end)
            refusal, _ = actor.hear(end)
            assert REJECT_CODES[refusal.code] == "bad_message"
            assert reason in refusal.text
    assert stage.exchange.counts.bad == 6
    actor.say(Hello(PROTOCOL, actor.actor, "1", bytes(16), 0, 0), to=actor.weights)
    assert WRONG_PORT in actor.hear(actor.weights)[0].text
    assert stage.is_quiet()


def test_a_hello_said_twice_does_no_harm(stage: Stage) -> None:
    actor = ByHand(stage, 1)
    _, first = actor.join()
    actor.say(Hello(PROTOCOL, actor.actor, "1", bytes(16), 0, 0))
    again = stage.learner.data.hear(Hello)
    # The same connection, by which the learner knows that it is the same.
    assert again.route == first.route
    assert stage.exchange.num_actors == 1


def say_hello(data: Dealer, number: int) -> None:
    hello = Hello(PROTOCOL, number.to_bytes(16, "big"), "1", bytes(16), 0, 0)
    until(lambda: data.send([pack(hello)]))


def assert_told(frames: Sequence[memoryview] | None, code: str) -> None:
    assert frames is not None
    refusal = unpack(frames[0])
    assert isinstance(refusal, Reject)
    assert REJECT_CODES[refusal.code] == code
    assert refusal.retry_after_s == (FULL_RETRY_S if code == "full" else -1)


def test_a_flood_of_hellos_costs_only_those_who_are_not_welcome_yet(stage: Stage) -> None:
    (actor,) = stage.crew(1)
    stranger = stage.dial(stage.data)
    for number in range(2 * MAX_ACTORS):
        say_hello(stranger, 1000 + number)
    # The oldest of them are told to come again, and no socket is kept for them.
    for _ in range(MAX_ACTORS + 1):
        assert_told(stranger.receive(WITHIN_S), "full")
    assert stage.ask(lambda: len(stage.exchange._by_actor)) == MAX_ACTORS
    stage.learner.data.drain()
    actor.say(Data(actor.session, 0, 1, 1, 5, 2, 0, 0, b"inline"))
    heard = stage.learner.data.find(Data)
    heard.answer(Grant(actor.session, 1, 1, 1, 1, []))
    assert isinstance(actor.hear()[0], Grant)


def test_who_has_a_session_gives_way_to_nobody(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("impala_async.relay.exchange.MAX_ACTORS", 2)
    first, second = stage.crew(2)
    late = stage.dial(stage.data)
    say_hello(late, 3)
    assert_told(late.receive(WITHIN_S), "full")
    # One of them comes back, which makes no more of them.
    first.data = stage.dial(stage.data)
    first.join()
    assert set(stage.exchange._by_session) == {first.session, second.session}


@pytest.mark.parametrize("num_free", [0, 1])
def test_without_sockets_an_actor_is_told_to_wait(tmp_path: Path, num_free: int) -> None:
    # Two each of the learner, the relay and the actor; it needs two more.
    with closing(Stage(tmp_path, max_sockets=6 + num_free)) as stage:
        actor = ByHand(stage, 1)
        say_hello(actor.data, 1)
        if num_free:
            stage.learner.welcome(stage.learner.data.hear(Hello), settings_of())
        assert_told(actor.data.receive(WITHIN_S), "full")
        assert not stage.exchange._by_actor


def test_a_hello_brings_nothing_else(stage: Stage) -> None:
    stranger = stage.dial(stage.data)
    hello = Hello(PROTOCOL, b"h" * 16, "1", bytes(16), 0, 0)
    until(lambda: stranger.send([pack(hello), bytes(1 << 20)]))
    assert_told(stranger.receive(WITHIN_S), "bad_message")
    assert stage.exchange.counts.bad == 1
    assert stage.is_quiet()
    assert not stage.exchange._by_actor


def test_the_learner_can_no_longer_route_to_an_actor_that_is_gone(stage: Stage) -> None:
    first, second = stage.crew(2)
    for actor in (first, second):
        actor.say(Heartbeat(actor.session, {}), to=actor.weights)
        stage.learner.weights.hear(Heartbeat)
    actor = ByHand(stage, 7)
    _, hello = actor.join()
    actor.data.close()
    router, grant = stage.learner.data.router, pack(Grant(actor.session, 1, 0, 1, 1, []))
    until(lambda: not router.send(hello.route, [grant]))
    until(lambda: stage.exchange.num_actors == 2)


def test_who_is_silent_for_several_leases_is_gone(stage: Stage) -> None:
    quiet, loud = ByHand(stage, 1), ByHand(stage, 2)
    quiet.join(lease_s=1.0)
    loud.join(lease_s=60.0)
    passages = stage.exchange._by_session
    heard_at = passages[quiet.session].last_heard
    stage.ask(lambda: stage.exchange.sweep(heard_at + 3.5))
    assert list(passages) == [loud.session]


def test_what_is_said_while_the_learner_is_away_waits_for_it(stage: Stage) -> None:
    (actor,) = stage.crew(1)
    url, router = stage.learner.url, stage.learner.data.router
    router.close()
    lane = stage.exchange._by_session[actor.session].data
    until(lambda: not stage.ask(lambda: lane.dealer.send([pack(NotModified(0, 0))])))
    for seq in range(3):
        actor.say(Data(actor.session, seq, 1, 1, 5, 2, 0, 0, b"inline"))
    until(lambda: len(lane._waiting) == 3)
    until(lambda: stage.learner_is_back(url))
    heard = [stage.learner.data.find(Data).message.seq for _ in range(3)]
    assert heard == [0, 1, 2]
    assert stage.exchange.counts.lost == 0
