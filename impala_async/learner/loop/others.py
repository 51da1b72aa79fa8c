"""The other ranks of a learner, as the event loop knows them: where they listen, what they report.

Runs on: event loop; what ranks say to each other is said by another thread
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from impala_async.config.ranks import check_alike
from impala_async.errors import RankError
from impala_async.learner.handoff import on_thread
from impala_async.metrics.names import Value
from impala_async.schema import Schema
from impala_async.training.ranks import Ranks

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
# With the goodbye they are within the ten seconds that an end may take.
TELL_S, HEARD_S = 5.0, 2.0


class OtherRanks:
    """At others than rank 0 a sink of reports too, of which the learner thread tells rank 0."""

    def __init__(self, ranks: Ranks) -> None:
        self.are_some = ranks.are_many
        self.newest: list[bytes] = [b"{}"]
        self.reports: Sequence[Mapping[str, Value]] = ()
        """Those of the other ranks, at rank 0: the last that it knows."""
        self._ranks = ranks

    def write(self, report: Mapping[str, Value]) -> None:
        self.newest[0] = json.dumps(report, allow_nan=False).encode()

    def close(self) -> None:
        pass

    def take(self, said: Sequence[bytes]) -> None:
        if said:
            self.reports = [json.loads(each) for each in said]

    async def meet(
        self, url: str, schema: Schema | None, accounts: Mapping[str, Value]
    ) -> list[str]:
        """Where each rank listens; ConfigError where their environments are not alike. The accounts
        with which a rank begins, of a resumed run, are its report until it writes one."""
        self.write(accounts)
        spaces = None if schema is None else schema.digest.hex()
        own = {"url": url, "spaces": spaces, "accounts": accounts}
        of_ranks = [json.loads(each) for each in await self._gather(json.dumps(own).encode())]
        check_alike([{"the digest of the spaces": each["spaces"]} for each in of_ranks])
        if self._ranks.place.is_first:
            self.reports = [each["accounts"] for each in of_ranks[1:]]
        return [each["url"] for each in of_ranks]

    async def watch(self, stop: Callable[[str], None]) -> None:
        """Until all have met there are no words between them. Then the end of one, too, is that of
        all, for the same reason."""
        reason: str | None = None

        def look() -> None:
            nonlocal reason
            reason = self._ranks.find_ending()

        while not self._ranks.have_met:
            await asyncio.sleep(LOOK_EVERY_S)
            with suppress(OSError):  # the system has no thread left
                await on_thread("ranks", look)
            if reason is not None:
                stop(reason)

    async def leave(self, reason: str, *, has_built: bool) -> None:
        """End before all have met. The others hear why, unless rank 0 is gone or stands still."""
        tell = on_thread("ranks", lambda: self._ranks.tell_ending(reason))
        with suppress(RankError, OSError, TimeoutError):
            await asyncio.wait_for(tell, TELL_S)
        if not has_built:
            # The thread of one that has built waits for us, and fails when we go: it is to have
            # heard of this before.
            await asyncio.sleep(HEARD_S)

    async def report_last(self, report: Callable[[], dict[str, Value]]) -> dict[str, Value]:
        """Write the last report: rank 0 when it has those of all the others."""
        found = None if self._ranks.place.is_first else report()
        try:
            said = await self._gather(self.newest[0])
            self.take(said[1:] if self._ranks.place.is_first else ())
        except RankError as error:
            logger.warning("the last report lacks what other ranks did at the end: %s", error)
        return report() if found is None else found

    async def _gather(self, own: bytes) -> list[bytes]:
        """The words of all ranks. The learner thread must not say anything meanwhile."""
        found: list[Any] = []
        await on_thread("ranks", lambda: found.extend(self._ranks.gather(own)))
        return found
