"""A welcome is rewritten where it says how to reach the learner, and nowhere else."""

from collections.abc import Iterator

import pytest

from impala_async.relay.welcome import Translator
from impala_async.wire.codec import decode_settings, encode_settings
from impala_async.wire.local_link import LocalLink
from impala_async.wire.messages import Welcome, pack, unpack

WELCOME = Welcome(
    run_id=b"r" * 16,
    epoch=3,
    session=b"s" * 16,
    rank=1,
    weights_port=5556,
    ipc_data="/there/data",
    ipc_weights="/there/weights",
    nonce_path="/there/nonce",
    nonce=b"n" * 16,
    lease_s=10.0,
    heartbeat_s=2.0,
    max_columns=64,
)
HERE = ("weights_port", "ipc_data", "ipc_weights", "nonce_path", "nonce")


@pytest.fixture
def link() -> Iterator[LocalLink]:
    made = LocalLink()
    yield made
    made.close()


def settings_of(compress: str, mode: str = "async") -> dict[str, object]:
    return {"seed": 7, "actor": {"compress": compress, "threads": 1}, "pace": {"mode": mode}}


def test_weights_and_ipc_are_here_and_all_else_is_the_learner_s(link: LocalLink) -> None:
    frames = [pack(WELCOME), encode_settings(settings_of("auto"))]
    told, is_lockstep = Translator(link, 1234, is_far=False).translate(WELCOME, frames)
    here = unpack(told[0])
    assert isinstance(here, Welcome)
    assert [getattr(here, name) for name in HERE] == [
        *(1234, link.data_path, link.weights_path, link.nonce_path, link.nonce)
    ]
    kept = {name: getattr(WELCOME, name) for name in HERE}
    assert here._replace(**kept) == WELCOME
    assert told[1:] == frames[1:]
    assert not is_lockstep


@pytest.mark.parametrize(
    ("is_far", "compress", "told"),
    [
        (True, "auto", "on"),
        (True, "off", "off"),
        (True, "on", "on"),
        (False, "auto", "auto"),
        (False, "on", "on"),
    ],
)
def test_the_way_that_counts_is_the_relay_s(
    link: LocalLink, is_far: bool, compress: str, told: str
) -> None:
    frames = [pack(WELCOME), encode_settings(settings_of(compress))]
    relayed = Translator(link, 1234, is_far).translate(WELCOME, frames)
    assert decode_settings(relayed.frames[1]) == settings_of(told)


def test_lockstep_is_seen(link: LocalLink) -> None:
    frames = [pack(WELCOME), encode_settings(settings_of("auto", "lockstep"))]
    assert Translator(link, 1234, is_far=False).translate(WELCOME, frames).is_lockstep


@pytest.mark.parametrize("rest", [[], [b"\xc1"], [b"\x93\1\2\3"]])
def test_settings_that_are_not_understood_go_on_as_they_are(
    link: LocalLink, rest: list[bytes]
) -> None:
    relayed = Translator(link, 1234, is_far=True).translate(WELCOME, [pack(WELCOME), *rest])
    assert relayed.frames[1:] == rest
    # No version is passed over where it is not known whether one may be.
    assert relayed.is_lockstep
