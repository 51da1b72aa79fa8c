"""Trajectories over real sockets into slots: what comes in whole, what is refused, and why."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from impala_async.learner.slots import Region
from impala_async.schema import Schema
from impala_async.weights import Lineage, Version
from impala_async.wire.codec import EPISODE, ZSTD, compress, encode_data
from impala_async.wire.messages import REJECT_CODES, VERDICTS, Data, pack
from tests.learner.columns import Planes, big_schema, planes_of, same, small_schema
from tests.learner.hand_actor import Actor
from tests.learner.server_harness import ServerHarness

Make = Callable[..., ServerHarness]


@pytest.mark.parametrize("schema", [small_schema(), big_schema()], ids=["inline", "three frames"])
@pytest.mark.parametrize("columns", [1, 2, 4])
async def test_columns_arrive_as_they_were_sent(
    make_harness: Make, schema: Schema, columns: int
) -> None:
    harness = make_harness(schema)
    actor = await harness.join(columns)
    sent = [await actor.send() for _ in range(4 // columns)]
    assert len(harness.full) == 1
    taken = harness.train()
    for i in range(4):
        assert same(taken, i, sent[i // columns].columns, i % columns)
    assert harness.count("trajectories/trained") == 4
    assert actor.verdicts == []
    assert actor.rejects == []


@pytest.mark.parametrize("schema", [small_schema(), big_schema()], ids=["inline", "three frames"])
async def test_a_message_that_does_not_fit_is_split_over_two_slots(
    make_harness: Make, schema: Schema
) -> None:
    harness = make_harness(schema)
    actor = await harness.join(3)
    sent = []
    for _ in range(4):
        sent.append(await actor.send())
        assert harness.count("trajectories/in_slots") == 3 * len(sent)
    columns = [(planes.columns, i) for planes in sent for i in range(3)]
    taken = [harness.train() for _ in range(3)]
    for i, (planes, column) in enumerate(columns):
        assert same(taken[i // 4], i % 4, planes, column)
    assert harness.counts()["trajectories/trained"] == 12


async def test_a_slot_knows_versions_and_valid_rows_of_its_columns(make_harness: Make) -> None:
    harness = make_harness()
    harness.publish(7)
    actor = await harness.join(2)
    planes = planes_of(harness.schema, 2)
    planes.columns.mask_CT[1, :2] = False
    await actor.send(planes, update=5)
    await actor.send(update=7)
    slot = harness.slots[harness.full[0]]
    assert slot.updates_B.tolist() == [5, 5, 7, 7]
    assert slot.valid_rows_B.tolist() == [3, 1, 3, 3]
    assert slot.batch == 1


async def test_episodes_arrive_with_their_message(make_harness: Make) -> None:
    harness = make_harness(big_schema())
    actor = await harness.join(2)
    await actor.send(episodes=[(1.5, 2), (-3.0, 1)])
    await actor.send()
    assert harness.episodes == [(1.5, 2), (-3.0, 1)]


async def test_actors_of_different_widths_mix(make_harness: Make) -> None:
    harness = make_harness(big_schema())
    narrow, wide = await harness.join(1), await harness.join(3)
    sent: list[tuple[Planes, int]] = []
    for actor in (narrow, wide, narrow, wide):
        planes = await actor.send(planes_of(harness.schema, actor.columns, seed=len(sent)))
        sent += [(planes, i) for i in range(actor.columns)]
    taken = [harness.train(), harness.train()]
    assert all(same(taken[i // 4], i % 4, p.columns, c) for i, (p, c) in enumerate(sent))


def without(planes: Planes, **leaves: Any) -> Planes:
    """The same columns with a fault in the last one."""
    for name, value in leaves.items():
        array = {
            "obs": planes.columns.obs.get("speed"),
            "action": planes.columns.actions.get("leg"),
            "reward": planes.columns.rewards_CT,
            "log_prob": planes.columns.log_probs_CT,
            "mask": planes.columns.mask_CT.view(np.uint8),
            "terminated": planes.columns.terminated_CT.view(np.uint8),
        }[name]
        assert array is not None
        array[-1, -1] = value
    return planes


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"obs": np.nan}, "nonfinite"),
    ({"obs": -np.inf}, "nonfinite"),
    ({"obs": 1e38}, "nonfinite"),
    ({"reward": np.inf}, "nonfinite"),
    ({"reward": 1e38}, "nonfinite"),
    ({"log_prob": np.nan}, "nonfinite"),
    ({"action": 4}, "invalid"),
    ({"action": -1}, "invalid"),
    ({"log_prob": 2e-6}, "invalid"),
    ({"mask": 2}, "invalid"),
    ({"terminated": 255}, "invalid"),
]


@pytest.mark.parametrize(("fault", "reason"), FAULTS)
async def test_a_bad_value_refuses_the_message_and_leaves_the_others(
    make_harness: Make, fault: dict[str, Any], reason: str
) -> None:
    harness = make_harness(big_schema(), learner={"batch_columns": 8})
    bad, good = await harness.join(2), await harness.join(2)
    sent = [await good.send()]
    await bad.send(without(planes_of(harness.schema, 2, seed=9), **fault))
    assert bad.verdicts == [[0, VERDICTS.index(reason)]]
    assert harness.count(f"rejected/{reason}") == 2 == harness.count("trajectories/rejected")
    sent += [await good.send() for _ in range(3)]
    taken = harness.train()
    assert all(same(taken, i, sent[i // 2].columns, i % 2) for i in range(8))
    assert good.verdicts == []
    assert good.rejects == []


async def test_what_a_masked_row_holds_is_never_looked_at(make_harness: Make) -> None:
    harness = make_harness(big_schema())
    actor = await harness.join()
    planes = planes_of(harness.schema, 1)
    planes.columns.mask_CT[0, 1] = False
    planes.columns.rewards_CT[0, 1] = np.nan
    planes.columns.log_probs_CT[0, 1] = np.inf
    await actor.send(planes)
    assert actor.verdicts == []
    assert harness.count("trajectories/admitted") == 1


@pytest.mark.parametrize(
    ("episodes", "reason"),
    [
        ([(np.nan, 3)], "nonfinite"),
        ([(-1e38, 3)], "nonfinite"),
        ([(1.0, 2), (-np.inf, 1)], "nonfinite"),
        ([(1.0, 0)], "invalid"),
        ([(1.0, -5)], "invalid"),
    ],
)
async def test_episode_statistics_are_checked_too(
    make_harness: Make, episodes: list[tuple[float, int]], reason: str
) -> None:
    harness = make_harness()
    actor = await harness.join()
    await actor.send(episodes=episodes)
    assert actor.verdicts == [[0, VERDICTS.index(reason)]]
    assert harness.episodes == []
    assert harness.count(f"rejected/{reason}") == 1


def frames_of(actor: Actor, planes: Planes, **fields: Any) -> list[Any]:
    return encode_data(actor.header(**fields), planes.obs, planes.small, [])


def broken(actor: Actor, what: str) -> list[Any]:
    """The frames of a message of one column, not as they should be."""
    header, obs, small = frames_of(actor, planes_of(actor.schema, 1))
    inline = actor.header(body=bytes(64))
    squeezed = pack(actor.header(codec=ZSTD))
    return {
        "obs too short": [header, obs[:-1], small],
        "obs too long": [header, bytes(obs) + b"x", small],
        "obs empty": [header, b"", small],
        "small too short": [header, obs, small[:-8]],
        "small too long": [header, obs, small + b"x"],
        "swapped": [header, small, obs],
        "squeezed, but it is not": [squeezed, obs, small],
        "squeezed too short": [squeezed, compress(obs[:-1]), small],
        "squeezed too long": [squeezed, compress(memoryview(bytes(obs) + b"x")), small],
        "squeezed frame too long": [squeezed, bytes(obs) + b"x", small],
        "squeezed, small too short": [squeezed, compress(obs), small[:-8]],
        "no body": [header],
        "one frame short": [header, obs],
        "squeezed, one frame short": [squeezed, compress(obs)],
        "one frame more": [header, obs, small, b""],
        "inline too short": [pack(inline)],
        "inline and squeezed": [pack(inline._replace(codec=ZSTD))],
        "wrong rows": [pack(actor.header(rows=actor.schema.rows + 1)), obs, small],
        "one row": [pack(actor.header(rows=1)), obs, small],
        "more episodes than rows": [pack(actor.header(num_episodes=4)), obs, small + bytes(32)],
        "episodes that are not there": [pack(actor.header(num_episodes=1)), obs, small],
    }[what]


SIZES = [
    *("obs too short", "obs too long", "obs empty", "small too short", "small too long", "swapped"),
    *("inline too short", "wrong rows", "one row", "more episodes than rows"),
    "episodes that are not there",
    *("squeezed, but it is not", "squeezed too short", "squeezed too long"),
    *("squeezed frame too long", "squeezed, small too short", "inline and squeezed"),
]
COUNTS = [
    "squeezed, one frame short",
    "no body",
    "one frame short",
    "one frame more",
]


@pytest.mark.parametrize(
    ("what", "reason"),
    [(w, "wrong_size") for w in SIZES] + [(w, "wrong_frame_count") for w in COUNTS],
)
async def test_a_body_of_the_wrong_form_is_refused_and_told(
    make_harness: Make, what: str, reason: str
) -> None:
    harness = make_harness(big_schema(), learner={"batch_columns": 8})
    bad, good = await harness.join(), await harness.join(3)
    header, *frames = broken(bad, what)
    await bad.say(header, *frames)
    await bad.hear(lambda: len(bad.rejects) == 1)
    assert bad.rejects[0].code == REJECT_CODES.index("bad_message")
    assert bad.rejects[0].text.startswith(reason)
    assert harness.count(f"bad/{reason}") == 1 == harness.count("wire/bad")
    assert harness.count("trajectories/admitted") == 0
    # What lay half-written in the slot is written over: by another actor and by the same one.
    sent = [await good.send() for _ in range(2)]
    bad.seq = 1
    sent += [await bad.send() for _ in range(2)]
    taken = harness.train()
    columns = [(planes.columns, i) for planes in sent for i in range(len(planes.obs))]
    assert all(same(taken, i, *column) for i, column in enumerate(columns))
    assert good.verdicts == []
    assert good.rejects == []


async def test_a_duplicate_is_counted_and_taken_once(make_harness: Make) -> None:
    harness = make_harness()
    actor = await harness.join(2)
    await actor.send()
    num_grants = len(actor.grants)
    await actor.send(seq=0, is_waiting=False)
    await actor.hear(lambda: len(actor.grants) > num_grants)
    assert harness.count("rejected/duplicate") == 2
    assert harness.count("trajectories/in_slots") == 2
    # It was settled once, and no word of this one.
    assert actor.settled == 1
    assert actor.verdicts == []


async def test_without_credit_nothing_comes_in(make_harness: Make) -> None:
    harness = make_harness()
    actor = await harness.join()
    await actor.credit()
    await actor.send(seq=actor.granted, is_waiting=False)
    await actor.hear(lambda: bool(actor.rejects))
    assert actor.rejects[0].text.startswith("not_allowed_now")
    assert harness.count("bad/not_allowed_now") == 1
    assert harness.count("trajectories/received") == 0
    await actor.send(seq=0)
    assert harness.count("trajectories/admitted") == 1


async def test_more_columns_than_agreed_are_refused(make_harness: Make) -> None:
    harness = make_harness()
    actor = await harness.join(2)
    await actor.send(planes_of(harness.schema, 3), is_waiting=False)
    await actor.hear(lambda: bool(actor.rejects))
    assert harness.count("bad/not_allowed_now") == 1
    await actor.send(planes_of(harness.schema, 1), seq=0)
    assert harness.count("trajectories/admitted") == 1


async def test_data_of_an_unknown_session_is_counted_and_told_to_say_hello(
    make_harness: Make,
) -> None:
    harness = make_harness()
    stranger, good = harness.actor(2), await harness.join(2)
    await stranger.send(session=b"?" * 16, epoch=1, is_waiting=False)
    await stranger.hear(lambda: bool(stranger.rejects))
    assert stranger.rejects[0].code == REJECT_CODES.index("hello_again")
    assert stranger.rejects[0].retry_after_s == 0
    assert harness.count("rejected/unknown_session") == 2
    assert harness.count("bad/unknown_session") == 1
    await good.send()
    assert harness.count("trajectories/admitted") == 2


async def test_what_a_stranger_claims_to_send_is_no_more_than_a_batch(make_harness: Make) -> None:
    harness = make_harness(learner={"batch_columns": 4})
    stranger = harness.actor()
    await stranger.say(stranger.header(session=b"?" * 16, epoch=1, columns=4096))
    await stranger.hear(lambda: bool(stranger.rejects))
    assert harness.count("rejected/unknown_session") == 4 == harness.count("trajectories/received")


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        (Version(2, 140), None),
        (Version(1, 100), None),
        (Version(1, 101), "dead_branch"),
        (Version(2, 89), "stale"),
        (Version(2, 90), None),
        (Version(2, 141), "invalid"),
        (Version(3, 100), "invalid"),
        (Version(0, 140), "invalid"),
    ],
)
async def test_versions_are_judged_by_lag_and_lineage(
    make_harness: Make,
    caplog: pytest.LogCaptureFixture,
    version: Version,
    verdict: str | None,
) -> None:
    lineage = Lineage(1, {1: 0}).resumed(2, 100)
    harness = make_harness(lineage=lineage, learner={"max_lag": 50})
    harness.publish(140, epoch=2)
    actor = await harness.join()
    await actor.send(epoch=version.epoch, update=version.update)
    if verdict is None:
        assert harness.count("trajectories/admitted") == 1
        assert actor.verdicts == []
        assert "refused" not in caplog.text
    else:
        assert harness.count(f"rejected/{verdict}") == 1
        assert actor.verdicts == [[0, VERDICTS.index(verdict)]]
        (line,) = [line for line in caplog.messages if "is refused" in line]
        assert line.startswith("actor 0: a message of 1 columns is refused: it was acted with")
        assert line.endswith(f"({verdict}, 1 columns so far from all actors)")


async def test_after_the_close_nothing_counts(make_harness: Make) -> None:
    harness = make_harness()
    actor = await harness.join()
    await actor.send()
    harness.server.close_admission()
    assert harness.count("dropped/shutdown") == 1
    before = harness.count("wire/messages")
    await actor.send(is_waiting=False)
    await actor.hear(lambda: harness.count("wire/messages") > before)
    assert harness.count("trajectories/received") == 1
    assert harness.count("trajectories/in_slots") == 0


async def test_data_before_there_are_slots(make_harness: Make) -> None:
    harness = make_harness(is_open=False)
    actor = harness.actor()
    await actor.hello()
    await actor.send(epoch=1, is_waiting=False)
    await actor.hear(lambda: bool(actor.rejects))
    assert harness.count("bad/not_allowed_now") == 1
    assert harness.count("trajectories/received") == 0


# -------------------- a recorder


class FakeRecorder:
    def __init__(self) -> None:
        self.is_behind = False
        self.taken: list[tuple[int, Data, bytes, bytes]] = []

    def take(self, rank: int, data: Data, region: Region, episodes: Any) -> None:
        tail = b"" if episodes is None else episodes.tobytes()
        self.taken.append((rank, data, region.obs.tobytes(), region.small.tobytes() + tail))


def recorded(harness: ServerHarness) -> FakeRecorder:
    recorder = FakeRecorder()
    harness.server.admission._recorder = recorder
    return recorder


@pytest.mark.parametrize("schema", [small_schema(), big_schema()], ids=["inline", "three frames"])
async def test_what_is_admitted_is_recorded_as_it_was_sent(
    make_harness: Make, schema: Schema
) -> None:
    harness = make_harness(schema)
    recorder = recorded(harness)
    actors = [await harness.join(3), await harness.join(1)]
    sent = []
    # The second one of three columns is split over two slots.
    for actor in (actors[0], actors[1], actors[0]):
        planes = planes_of(schema, actor.columns, seed=len(sent))
        await actor.send(planes, episodes=[(1.5, 2)])
        tail = np.array([(1.5, 2)], EPISODE).tobytes()
        sent.append((planes.obs.tobytes(), planes.small.tobytes() + tail))
    assert [taken[2:] for taken in recorder.taken] == sent
    assert [rank for rank, *_ in recorder.taken] == [0, 1, 0]
    assert [(data.seq, data.columns) for _, data, *_ in recorder.taken] == [(0, 3), (0, 1), (1, 3)]


async def test_what_is_refused_is_not_recorded(make_harness: Make) -> None:
    harness = make_harness(big_schema())
    recorder = recorded(harness)
    actor = await harness.join(1)
    await actor.send(without(planes_of(harness.schema, 1), reward=np.inf))
    assert harness.count("rejected/nonfinite") == 1
    assert recorder.taken == []


async def test_no_credit_is_given_while_the_recorder_is_behind(make_harness: Make) -> None:
    harness = make_harness()
    recorder = recorded(harness)
    recorder.is_behind = True
    actor = await harness.join(1)
    await actor.hear(lambda: bool(actor.grants))
    harness.server.reap()
    assert harness.count("credit/granted_columns") == 0
    recorder.is_behind = False
    harness.server.reap()
    await actor.credit()
    # What was granted before is taken all the same.
    recorder.is_behind = True
    await actor.send()
    assert len(recorder.taken) == 1
