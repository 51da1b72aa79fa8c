"""A learner's welcome as the actors of a relay are to have it.

Runs on: main thread
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from impala_async.errors import ProtocolError
from impala_async.wire.codec import Frame, decode_settings, encode_settings
from impala_async.wire.local_link import LocalLink
from impala_async.wire.messages import Welcome, pack


class Relayed(NamedTuple):
    """The frames for the actor, and whether the run is in lockstep."""

    frames: list[Frame]
    is_lockstep: bool


@dataclass(frozen=True)
class Translator:
    """Says where weights and ipc are to be had, and how long the way really is."""

    link: LocalLink
    weights_port: int
    is_far: bool
    """Whether what goes up leaves this host."""

    def translate(self, welcome: Welcome, frames: Sequence[Frame]) -> Relayed:
        here = welcome._replace(
            weights_port=self.weights_port,
            ipc_data=self.link.data_path,
            ipc_weights=self.link.weights_path,
            nonce_path=self.link.nonce_path,
            nonce=self.link.nonce,
        )
        try:
            settings = decode_settings(frames[1])
        except (ProtocolError, IndexError):
            # The actor will say what is wrong with them.
            return Relayed([pack(here), *frames[1:]], is_lockstep=True)
        pace, actor = settings.get("pace"), settings.get("actor")
        if self.is_far and isinstance(actor, dict) and actor.get("compress") == "auto":
            # It would take its way for a short one.
            actor["compress"] = "on"
        is_lockstep = isinstance(pace, dict) and pace.get("mode") == "lockstep"
        return Relayed([pack(here), encode_settings(settings)], is_lockstep)
