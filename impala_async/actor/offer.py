"""What this actor runs, as it tells its learner, and the messages that follow from it.

Runs on: sampler thread
"""

from dataclasses import dataclass

from impala_async.actor.squeezer import Squeezer
from impala_async.actor.unroll import Finished, MessageBuffer
from impala_async.spec import Schema
from impala_async.weights import WeightsLayout
from impala_async.wire.codec import PLAIN, Frame, encode_data
from impala_async.wire.messages import SLOWEST_BYTES_PER_S, Data, Spec, pack
from impala_async.wire.peer import WINDOW


@dataclass(frozen=True)
class Offer:
    """Agreed once per session; sizes and dtypes never travel with the data."""

    schema: Schema
    layout: WeightsLayout
    columns: int
    """Of each message."""
    streams: int
    """Messages that are written side by side."""
    coarse_layout: WeightsLayout | None = None
    """The other one that weights may come in."""

    @property
    def weights_s(self) -> float:
        """How long weights may take to come down."""
        return self.layout.num_bytes / SLOWEST_BYTES_PER_S

    @property
    def layouts(self) -> tuple[WeightsLayout, ...]:
        """Weights come in one of these, or are those of another model."""
        return tuple(layout for layout in (self.layout, self.coarse_layout) if layout is not None)

    def make_buffers(self) -> list[MessageBuffer]:
        """For each stream a window under way, and one that is being written."""
        num_buffers = self.streams * (WINDOW + 1)
        return [MessageBuffer(self.schema, self.columns) for _ in range(num_buffers)]

    def spec_frames(self, session: bytes) -> list[Frame]:
        digests = self.schema.digest, self.layout.digest
        spec = Spec(session, *digests, self.columns, self.streams, gives_way=1)
        return [pack(spec), self.schema.to_json()]

    def data_frames(
        self, session: bytes, seq: int, finished: Finished, squeezer: Squeezer
    ) -> list[Frame]:
        """Big frames are views of the buffer, which must stay as it is until seq is settled."""
        buffer = finished.buffer
        data = Data(
            session=session,
            seq=seq,
            epoch=finished.version.epoch,
            update=finished.version.update,
            rows=self.schema.rows,
            columns=buffer.num_columns,
            codec=PLAIN,
            num_episodes=0,
            body=None,
        )
        return encode_data(data, buffer.obs, buffer.small, finished.episodes, squeezer.squeeze)
