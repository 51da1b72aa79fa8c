"""A whole network in one thread: a learner's table, actors with outboxes, and a wire that loses,
repeats, delays and reorders what is on it. The clock is a number."""

from impala_async.weights import Version
from impala_async.wire.messages import unpack
from impala_async.wire.peer import WINDOW
from tests.wire.fakes import ALL_COLUMNS, LEARNER, Checkpoint, FakeActor, FakeLearner, Wire


class Network(Wire):
    """One learner at a time, the actors, and all that is under way between them."""

    def __init__(self) -> None:
        super().__init__()
        self.actors: dict[bytes, FakeActor] = {}
        self.epoch = 0
        # From which version each epoch grew.
        self.parents: dict[int, Version | None] = {}
        self.checkpoint: Checkpoint | None = None
        self.restart()

    def restart(self) -> None:
        """A learner dies, and another one continues from the last checkpoint, if there is one."""
        self.epoch += 1
        self.parents[self.epoch] = self.checkpoint.version if self.checkpoint else None
        self.learner = FakeLearner(self, self.epoch, self.checkpoint, self.is_ancestor)

    def add_actor(self, columns: int, streams: int) -> "FakeActor":
        name = next(self.numbers).to_bytes(16, "big")
        self.actors[name] = FakeActor(self, name, columns, streams)
        return self.actors[name]

    def deliver(self, index: int = 0) -> None:
        """One message arrives; the wire may hold older ones."""
        to, sender, frame = self.messages.pop(index)
        if to == LEARNER:
            self.learner.receive(sender, unpack(frame))
        elif to in self.actors:
            self.actors[to].receive(unpack(frame))

    def is_ancestor(self, version: Version) -> bool:
        """Whether the learner's weights grew out of this version: by walking back."""
        epoch, update = self.learner.version
        while epoch != version.epoch:
            parent = self.parents.get(epoch)
            if parent is None:
                return False
            epoch, update = parent
        return version.epoch >= 1 and version.update <= update

    def settle_everything(self, patience_s: float = 60.0) -> None:
        """The wire works again, time passes, everybody works: what was produced gets settled."""
        produced = {actor: actor.outbox.next_seq for actor in self.actors.values()}
        give_up_at = self.now + patience_s
        while any(actor.outbox.lowest_unsettled < seq for actor, seq in produced.items()):
            assert self.now < give_up_at, "somebody waits for ever"
            self.work()

    def work(self, lost: type | None = None) -> int:
        """Half a second in which all messages arrive, but for those of one kind; how many were."""
        self.now += 0.5
        self.learner.reap()
        self.learner.release(ALL_COLUMNS)
        for actor in self.actors.values():
            # Credit that is never used is never free: whoever lives goes on.
            actor.produce(0)
            actor.tick()
        num_lost = 0
        while self.messages:
            if lost is not None and isinstance(unpack(self.messages[0][2]), lost):
                self.messages.pop(0)
                num_lost += 1
            else:
                self.deliver()
        self.check()
        return num_lost

    def check(self) -> None:
        """What holds at any moment."""
        learner = self.learner
        table = learner.table
        assert table.outstanding_columns <= learner.handed <= learner.free
        assert learner.received == learner.num_admitted + learner.rejected.total()
        for peer in table:
            assert peer.outstanding_messages <= WINDOW * peer.streams
            assert peer.granted >= peer.watermark.below
            assert len(peer.watermark.above) <= 2 * WINDOW * peer.streams
        for actor in self.actors.values():
            assert actor.outbox.next_seq - actor.outbox.lowest_unsettled == len(actor.outbox)
