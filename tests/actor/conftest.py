"""The scene of tests that talk to an actor over real sockets."""

import pytest

from impala_async.actor import joining
from impala_async.wire import actor_side
from impala_async.wire.keys import new_key
from tests.actor.scripted import open_scene


@pytest.fixture
def quick_hellos(monkeypatch):
    """Ten times as often as they are said in earnest."""
    monkeypatch.setattr(actor_side, "HELLO_EVERY_S", 0.1)


@pytest.fixture
def scene(tmp_path, monkeypatch):
    # A scripted learner answers no goodbye.
    monkeypatch.setattr(joining, "BYE_OK_S", 0.01)
    with open_scene(tmp_path) as opened:
        yield opened


@pytest.fixture
def locked_scene(tmp_path, monkeypatch):
    """Its learner wants a key, which is `scene.key`."""
    monkeypatch.setattr(joining, "BYE_OK_S", 0.01)
    key = new_key()
    with open_scene(tmp_path, key) as opened:
        opened.key = key
        yield opened
