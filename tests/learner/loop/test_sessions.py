"""Everything that an actor says except its trajectories: a message and a time in, answers out."""

import functools
import hashlib
import json
import logging
from dataclasses import replace

import pytest

from impala_async import __version__
from impala_async.config.ranks import Place
from impala_async.errors import CheckpointError, SpacesError
from impala_async.learner.loop.placement import Placement
from impala_async.learner.loop.sessions import MAX_LINES_PER_S, PeerLog
from impala_async.metrics.report import merge
from impala_async.schema import MAX_SCHEMA_BYTES, ArraySpec, ObsSpec
from impala_async.weights import Version
from impala_async.wire import messages as wire
from tests.learner.columns import small_schema
from tests.learner.hand_actor import LAYOUT
from tests.learner.pure_learner import RUN_ID, HandActor, PureLearner

SCHEMA = small_schema()
NOBODY = b"?" * 16
learner_of = functools.partial(PureLearner, SCHEMA)


def refusal(actor, code="mismatch"):
    """The text of the refusal that came."""
    assert [reject.code for reject in actor.rejects] == [wire.REJECT_CODES.index(code)]
    return actor.rejects.pop().text


# -------------------- hello, goodbye, and who is here


def test_a_welcome_says_what_an_actor_must_know():
    learner = learner_of(columns=6)
    first, second = HandActor(learner), HandActor(learner)
    for actor in (first, second, second, second):
        assert actor.hello() == ""
    welcome, other = first.welcome, second.welcome
    assert (welcome.run_id, welcome.epoch, welcome.number, welcome.max_columns) == (RUN_ID, 1, 0, 6)
    assert (first.settings, other.number, first.session != second.session) == (b"settings", 1, True)
    # A hello that is said again opens nothing, and nobody has joined before its Spec came.
    report = learner.report()
    assert (report["sessions/opened"], report["num_actors"], len(learner.table)) == (2, 0, 2)


def ranks_of(learner, *urls):
    """Rank 0 of several; the others listen at these."""
    placement = learner.sessions.placement = Placement(Place(0, 1 + len(urls)))
    placement.open(("tcp://a:1", *urls))
    return placement


def test_actors_are_sent_to_other_ranks_but_those_with_a_number_and_those_who_are_here():
    learner = learner_of()
    ranks_of(learner, "tcp://b:2")
    actors = [HandActor(learner) for _ in range(4)]
    for actor in actors:
        actor.hello()
    assert [bool(actor.welcome) for actor in actors] == [True, False, True, False]
    assert refusal(actors[1], "elsewhere") == "tcp://b:2"
    assert refusal(actors[3], "elsewhere") == "tcp://b:2"
    assert (learner.report()["sessions/refused"], len(learner.table)) == (0, 2)
    numbered = HandActor(learner)
    numbered.hello(number=3)
    assert numbered.welcome.number == 3
    actors[0].spec()
    actors[0].hello()
    assert not actors[0].rejects


def test_nobody_is_answered_before_it_is_known_where_other_ranks_listen():
    learner = learner_of()
    learner.sessions.placement = Placement(Place(0, 2))
    actor = HandActor(learner)
    assert (actor.hello(), actor.rejects, len(learner.table)) == ("", [], 0)


def test_the_newest_is_let_go_with_all_that_it_sent_settled():
    learner = learner_of(columns=2)
    ranks_of(learner, "tcp://b:2").note(((0, 9), (0, 9)))
    numbered = HandActor(learner)
    numbered.hello(number=0)
    numbered.spec()
    assert learner.sessions.let_one_go(now=5.0) == []
    actor = HandActor(learner).join()
    actor.send()
    # The only one that works stays.
    assert learner.sessions.let_one_go(now=5.0) == []
    numbered.send()
    silent = HandActor(learner).join()
    grant, bye = learner.sessions.let_one_go(now=5.0)
    assert wire.unpack(grant.frames[0]).settled == 1
    said = wire.unpack(bye.frames[0])
    assert (said.session, wire.BYE_REASONS[said.reason]) == (actor.session, "moving")
    assert len(learner.table) == 2
    # Where only one is left that works, another one goes.
    _, bye = learner.sessions.let_one_go(now=5.0)
    assert wire.unpack(bye.frames[0]).session == silent.session
    assert learner.report()["sessions/closed"] == 2
    learner.sessions.placement.note(((1, 0), (1, 0)))
    actor.hello()
    assert refusal(actor, "elsewhere") == "tcp://b:2"


def test_goodbyes_end_sessions_and_say_why(caplog):
    caplog.set_level("INFO")
    learner = learner_of()
    actors = [HandActor(learner).join() for _ in range(3)]
    actors.append(HandActor(learner))
    actors[3].hello()
    caplog.clear()
    died = "EnvError: it broke\nactor 7 joined"
    actors[0].say(wire.Bye(actors[0].session, wire.BYE_REASONS.index("leaving")))
    actors[1].say(wire.Bye(actors[1].session, 2, died))
    actors[2].say(wire.ByeOk(actors[2].session))
    # Nobody misses who never joined.
    actors[3].say(wire.Bye(actors[3].session, 2, "EnvError: it was not made"))
    died = died.replace("\n", r"\n")
    assert caplog.messages == [
        "actor 0 is gone: said goodbye (leaving)",
        f"actor 1 is gone: it died of {died}",
        "actor 2 is gone: left",
    ]
    oks = [[wire.unpack(one[0]) for one in actor.others] for actor in actors]
    told = [[wire.ByeOk(actor.session)] for actor in actors]
    assert oks == [told[0], told[1], [], told[3]]
    report = learner.report()
    assert report["actor/last_death"] == f"actor 1 died of {died}"
    assert (report["sessions/closed"], report["num_actors"]) == (4, 0)
    assert report["credit/granted_columns"] == 0
    # A goodbye to a session that is over changes nothing.
    assert actors[2].say(wire.Bye(NOBODY, 0)) == actors[2].say(wire.ByeOk(NOBODY)) == ""
    assert (actors[2].others, learner.report()["sessions/closed"]) == ([], 4)
    # That no one is there is not its doing where another has come since.
    HandActor(learner).join()
    assert learner.report()["actor/last_death"] is None


def test_who_speaks_of_no_session_is_unknown_and_who_says_what_is_not_his_not_allowed():
    learner = learner_of()
    actor = HandActor(learner).join()
    assert actor.say(wire.Spec(NOBODY, NOBODY, NOBODY, 1, 1), b"{}") == "unknown_session"
    assert (
        actor.pull(wire.Get(NOBODY, 1, 1))
        == actor.pull(wire.Heartbeat(NOBODY, {}))
        == "unknown_session"
    )
    ours = [wire.Grant(actor.session, 1, 0, 1, 0, []), wire.NotModified(1, 1)]
    for message in [*ours, wire.Get(actor.session, 1, 1), wire.Heartbeat(actor.session, {})]:
        assert actor.say(message) == "not_allowed_now"
    for message in [*ours, wire.ByeOk(actor.session), actor.hello_of(), actor.header()]:
        assert actor.pull(message) == "not_allowed_now"
    assert learner.report()["num_actors"] == 1


def test_a_learner_that_ends_welcomes_nobody_and_tells_everybody():
    learner = learner_of(is_open=False)
    known, late = HandActor(learner), HandActor(learner)
    known.hello()
    learner.admission.close()
    assert known.spec() == late.hello() == ""
    assert (learner.schemas, known.grants, late.welcome) == ([], [], None)
    (answer,) = learner.sessions.say_bye("finished")
    assert answer.route == known.route
    assert wire.unpack(bytes(answer.frames[0])) == wire.Bye(
        known.session, wire.BYE_REASONS.index("finished")
    )


# -------------------- what is run: agreed, or refused with the field and both values


def test_a_spec_that_comes_again_is_answered_and_said_of_once_as_another_build_is(caplog):
    """Over a new connection, to which the answers go from then on."""
    caplog.set_level("INFO")
    learner = learner_of()
    actor, again = HandActor(learner, 2), HandActor(learner, 2)
    actor.hello(build="9.9\nall is well")
    assert caplog.messages == []
    actor.spec()
    again.session = actor.session
    again.spec()
    assert again.grants[0].session == actor.session
    assert (learner.report()["num_actors"], caplog.text.count("joined with 2 columns")) == (1, 1)
    assert caplog.messages[1:] == [rf"actor 0 runs 9.9\nall is well, the learner {__version__}"]


WIDER = replace(SCHEMA, obs=ObsSpec((ArraySpec("", (3,), "float32"),)))


@pytest.mark.parametrize("is_open", [True, False])
def test_who_does_not_fit_is_told_the_field_and_both_values(is_open):
    learner = learner_of(is_open=is_open)
    learner.find_layout = lambda schema: LAYOUT
    longer = HandActor(learner, schema=replace(SCHEMA, rows=4))
    cases = [(longer, "rows: 3 at the learner, 4 at the actor")]
    # Without a schema the first actor brings one, but its rows are ours.
    if is_open:
        cases += [(HandActor(learner, schema=WIDER), "(2,) at the learner, (3,) at the actor")]
    cases += [(HandActor(learner, 5), "actor.num_envs: 5 at the actor, but")]
    cases += [(HandActor(learner), "the model differs")]
    cases[-1][0].layout = NOBODY
    for actor, says in cases:
        learner.now += 1.0
        actor.hello()
        actor.spec()
        assert says in refusal(actor)
    assert (len(learner.table), learner.report()["sessions/refused"]) == (0, len(cases))
    assert (learner.schemas, learner.sessions.schema) == ([], SCHEMA if is_open else None)


def test_without_a_schema_the_first_actor_brings_it():
    learner = learner_of(is_open=False)
    HandActor(learner).join()
    assert (learner.schemas, learner.sessions.schema) == ([SCHEMA], SCHEMA)
    learner.now += 1.0
    other = HandActor(learner, schema=WIDER).join()
    assert "(2,) at the learner, (3,) at the actor" in refusal(other)
    assert len(learner.schemas) == 1


def test_a_first_schema_that_comes_to_nothing_is_refused():
    for fault, says in (
        (SpacesError("no recurrent state"), "no recurrent state"),
        (CheckpointError("ckpt-1-70 does not fit"), "ckpt-1-70 does not fit"),
        (MemoryError(), "no memory"),
        (None, "the model differs"),
    ):
        learner = learner_of(is_open=False)

        def build(schema, fault=fault, learner=learner):
            if fault is not None:
                raise fault
            # The layout of some models is known only when they are built.
            learner.open()

        learner.on_schema = build
        actor = HandActor(learner)
        actor.layout = NOBODY
        actor.join()
        assert says in refusal(actor)
        assert len(learner.table) == 0, says
        assert (learner.sessions.schema is None) == (fault is not None), says


def test_an_actor_without_a_model_is_told_the_layout_of_the_weights():
    learner = learner_of()
    actor = HandActor(learner)
    actor.layout = wire.NO_LAYOUT
    actor.join()
    (frame,) = actor.after_grant
    assert json.loads(frame) == [{"name": "w", "shape": [16], "dtype": "float32"}]
    actor.pull(wire.Get(actor.session, 0, 0))
    assert wire.unpack(actor.others[0][0]).layout_digest == hashlib.sha256(frame).digest()[:16]
    # Those who have one are told nothing.
    assert HandActor(learner).join().after_grant == []


BROKEN = [
    ([], "wrong_frame_count"),
    ([SCHEMA.to_json(), b""], "wrong_frame_count"),
    ([b" " * (MAX_SCHEMA_BYTES + 1)], "wrong_size"),
    ([b""], "malformed_header"),
    ([b"{}"], "malformed_header"),
    ([b"[" * 60_000], "malformed_header"),
    ([SCHEMA.to_json().replace(b"float32", b"object_")], "malformed_header"),
]


def test_a_broken_spec_is_told_decides_nothing_and_may_be_repeated():
    learner = learner_of(is_open=False)
    actor = HandActor(learner)
    actor.hello()
    for frames, reason in BROKEN:
        learner.now += 1.0
        spec = wire.Spec(actor.session, SCHEMA.digest, LAYOUT, 1, 1)
        assert actor.say(spec, *frames) == reason, frames
    assert learner.schemas == []
    learner.now += 1.0
    assert actor.spec() == ""
    assert len(actor.grants) == 1


def written_otherwise(actor, text, digest=None):
    actor.hello()
    actor.say(
        wire.Spec(actor.session, digest or hashlib.sha256(text).digest()[:16], LAYOUT, 1, 1), text
    )


def test_a_schema_may_be_written_in_any_way_and_has_the_digest_of_its_text():
    learner = learner_of()
    text = json.dumps(json.loads(SCHEMA.to_json()), indent=2).encode()
    actor, liar = HandActor(learner), HandActor(learner)
    written_otherwise(actor, text)
    learner.now += 1.0
    written_otherwise(liar, text, NOBODY)
    assert len(actor.grants) == 1
    assert "digest" in refusal(liar)


def test_schemas_that_are_not_ours_come_again_where_they_are_many_and_ours_is_known():
    learner, text = learner_of(), SCHEMA.to_json().ljust(MAX_SCHEMA_BYTES)
    first, second, ours = (HandActor(learner) for _ in range(3))
    written_otherwise(first, text)
    written_otherwise(second, text)
    assert "too many schemas" in refusal(second, "hello_again")
    assert ours.join().grants
    learner.now += 0.7
    written_otherwise(second, text)
    assert all(each.grants for each in (first, second))


def test_a_second_spec_cannot_widen_the_credit_of_the_first():
    learner = learner_of(num_slots=1)
    actor = HandActor(learner, 1).join()
    actor.columns = 4
    assert actor.spec() == "not_allowed_now"
    actor.columns = 1
    assert actor.spec() == actor.spec() == ""
    assert actor.spec(streams=2) == "not_allowed_now"
    actor.send()
    assert learner.report()["trajectories/admitted"] == 1


# -------------------- the weights port


def test_weights_are_for_those_who_have_said_their_spec():
    learner = learner_of()
    HandActor(learner).join()
    actor = HandActor(learner)
    actor.hello()

    def sizes():
        get = wire.Get(actor.session, 0, 0)
        return [len(made.frames) for made in learner.sessions.hear_pull(b"w", get, None, 0.0)]

    assert sizes() == [1]
    actor.spec()
    assert sizes() == [2]


def gets_some(actor, now, *have, is_sent=True):
    get = wire.Get(actor.session, *have)
    (made,) = actor.learner.sessions.hear_pull(actor.session, get, None, now)
    if is_sent and made.on_sent:
        made.on_sent()
    return len(made.frames) == 2


def test_the_same_version_goes_to_a_session_once_a_second_at_most():
    """It may have been lost; or somebody throws megabytes away to have more of them."""
    learner = learner_of()
    actor, other = HandActor(learner).join(), HandActor(learner).join()
    # One that could not be sent was none.
    assert gets_some(actor, 0.0, 0, 0, is_sent=False)
    assert [gets_some(actor, now, 0, 0) for now in (0.0, 0.9, 1.0, 1.1)] == [1, 0, 1, 0]
    assert gets_some(other, 1.1, 0, 0)
    learner.update += 1
    learner.publish()
    actor.send()
    assert [gets_some(actor, 1.2, *have) for have in ((1, 0), (1, 1), (1, 0), (0, 0))] == [
        1,
        0,
        0,
        0,
    ]
    assert gets_some(actor, 2.2, 1, 0)


def gets_newer(actor, now):
    learner = actor.learner
    learner.update += 1
    learner.publish()
    return gets_some(actor, now, 1, learner.update - 1)


def test_a_session_that_sends_nothing_gets_the_fourth_new_version_after_ten_seconds():
    """It has no use for them; and two hundred of them would take all that a learner can send."""
    actor = HandActor(learner_of()).join()
    assert [gets_newer(actor, 0.1 * number) for number in range(5)] == [1, 1, 1, 0, 0]
    assert [gets_newer(actor, now) for now in (10.1, 10.2, 11.0, 20.1)] == [0, 1, 0, 0]
    actor.send()
    assert [gets_newer(actor, 20.2 + 0.1 * number) for number in range(3)] == [1, 1, 1]


def test_saying_hello_again_makes_weights_no_cheaper():
    actor = HandActor(learner_of()).join()
    assert [gets_newer(actor, 0.1 * number) for number in range(3)] == [1, 1, 1]
    actor.join()
    assert [gets_newer(actor, now) for now in (0.3, 9.9, 10.3)] == [0, 0, 1]


def test_a_slow_actor_gets_newer_versions_until_it_is_long_overdue():
    """It acts with the newest that it has when it begins its next trajectory."""
    actor = HandActor(learner_of()).join()
    peer = actor.learner.sessions.table.find(actor.session, 0.0)
    assert peer.outstanding_messages == 1
    peer.usual_s, peer.used_at = 16.0, 0.0
    assert all(gets_newer(actor, 2.0 * number) for number in range(1, 30))
    assert [gets_newer(actor, 70.0 + 2.0 * number) for number in range(7)] == [1, 0, 0, 0, 0, 1, 0]
    # One that waits for credit is not to blame.
    peer.granted = peer.watermark.below
    assert peer.may_pull(Version(2, 0), peer.pulled_at + 2.0)


def test_a_late_word_over_the_connection_before_does_not_end_the_one_of_now():
    learner = learner_of()
    actor = HandActor(learner).join()
    beat = wire.Heartbeat(actor.session, {})
    hear = functools.partial(learner.sessions.hear_pull, message=beat, rest=None, now=0.0)
    ((first,), (second,)) = (hear(route) for route in (b"old", b"new"))
    assert (first.replaces, second.replaces) == (b"", b"old")
    # Two lay in the old one when it broke: a router takes from its pipes in turn.
    assert hear(b"old") == []
    (third,) = hear(b"new")
    assert third.replaces == b""


def test_weights_that_cannot_be_sent_now_are_to_be_asked_for_again():
    learner = learner_of()
    actor = HandActor(learner).join()

    def answer(message, route):
        (made,) = learner.sessions.hear_pull(route, message, None, 0.0)
        return made

    first = answer(wire.Get(actor.session, 0, 0), b"one")
    reply = wire.unpack(first.frames[0])
    assert (reply.update, reply.layout_digest, len(first.frames)) == (0, LAYOUT, 2)
    assert [wire.unpack(bytes(frame)) for frame in first.instead] == [wire.NotModified(1, 0)]
    assert not answer(wire.Get(actor.session, 1, 0), b"one").instead
    # A session has one connection for weights: each of many that read nothing would keep some.
    replaced = [
        answer(wire.Heartbeat(actor.session, {}), route).replaces for route in (b"two", b"two")
    ]
    assert (first.replaces, replaced) == (b"", [b"one", b""])
    # A heartbeat is answered with what it may do.
    actor.grants.clear()
    actor.pull(wire.Heartbeat(actor.session, {}))
    assert (actor.granted, actor.version) == (1, Version(1, 0))


def beat(actor, **timers):
    actor.pull(wire.Heartbeat(actor.session, timers))
    report = actor.learner.report()
    merge(report)
    return report


def test_what_actors_say_of_their_time_is_reported_as_medians():
    learner = learner_of()
    actors = [HandActor(learner).join() for _ in range(4)]
    assert beat(actors[0])["actor/env_time_ms"] is None
    # A name that nobody knows, and numbers that nobody can mean.
    beat(actors[0], env_time_ms=1.0, secret=1.0)
    beat(actors[1], env_time_ms=3.0)
    beat(actors[2], env_time_ms=-1.0)
    beat(actors[2], env_time_ms=1e30)
    report = beat(actors[3], env_time_ms=8.0)
    assert (report["actor/env_time_ms"], "actor/secret" in report) == (3.0, False)
    # Who is gone, or begins anew, is in no median.
    actors[3].say(wire.Bye(actors[3].session, 2))
    actors[1].hello()
    assert learner.report()["actor/env_time_ms"] == 1.0
    # The times of one without heartbeats are out of date, also while its trajectories come.
    learner.now = 6.0
    actors[0].send()
    assert learner.report()["actor/env_time_ms"] is None
    assert beat(actors[0], env_time_ms=2.0)["actor/env_time_ms"] == 2.0


def test_how_many_agents_act_at_once_stays_known_when_nobody_is_left():
    learner = learner_of()
    actors = [HandActor(learner).join() for _ in range(3)]
    assert beat(actors[0])["actor/agents_per_step"] is None
    for actor, agents in zip(actors, (2.0, 2.5, 90.0), strict=True):
        report = beat(actor, agents_per_step=agents)
    assert report["actor/agents_per_step"] == 2.5
    for actor in actors:
        actor.say(wire.Bye(actor.session, 2))
    assert learner.report()["actor/agents_per_step"] == 2.5


HANG = {"hang_s": 12.4, "hang_in": 0, "hang_first": 3, "hang_last": 3}


def test_a_hang_is_told_now_and_then_and_reported_with_its_seconds(caplog):
    learner = learner_of()
    first, second = HandActor(learner).join(), HandActor(learner).join()
    learner.now = 60.0
    assert beat(first, env_time_ms=1.0)["actor/hang"] is None
    beat(first, **HANG)
    beat(second, **HANG | {"hang_s": 10.0, "hang_in": 1, "hang_last": 6})
    learner.now = 64.0
    hang = beat(first, **HANG | {"hang_s": 16.4})["actor/hang"]
    assert hang == "environment 3 of actor 0 has been in step for 16 s"
    learner.now = 71.0
    beat(first, **HANG | {"hang_s": 23.4})
    # Who hangs by turns is told of as seldom.
    beat(first)
    beat(first, **HANG)
    assert caplog.messages == [
        "environment 3 of actor 0 has been in step for 12 s",
        "one of environments 3 to 6 of actor 1 has been in reset for 10 s",
        "environment 3 of actor 0 has been in step for 23 s",
    ]
    # It is over, or its session is.
    assert "actor 1" in str(beat(first)["actor/hang"])
    second.say(wire.ByeOk(second.session))
    assert learner.report()["actor/hang"] is None
    # No longer than its session, and of environments that there are.
    assert "for 71 s" in str(beat(first, **HANG | {"hang_s": 1e11})["actor/hang"])
    for wrong in ({"hang_first": -1}, {"hang_first": 4}, {"hang_last": 5000}):
        assert beat(first, **HANG | wrong)["actor/hang"] is None


# -------------------- lines that peers cause


def test_lines_are_few_and_each_stays_one(caplog, monkeypatch):
    now = 5.0
    monkeypatch.setattr("impala_async.learner.loop.sessions.time.monotonic", lambda: now)
    log = PeerLog()
    lines = []
    for number in range(8000):
        caplog.clear()
        now += 0.001
        log.say(logging.WARNING, "number %d: %s", number, "1.0\nERROR\x1b[2J \ud800 é")
        lines += [(now, line) for line in caplog.messages]
    # In any second, whenever it begins.
    for start, _ in lines:
        assert sum(start <= at < start + 0.999 for at, _ in lines) <= MAX_LINES_PER_S
    assert len(lines) >= 7 * MAX_LINES_PER_S
    quoted = r"1.0\nERROR\x1b[2J \ud800 é"
    assert lines[0][1] == f"number 0: {quoted}"
    assert next(line for _, line in lines if "more" in line) == "981 more lines like these"
