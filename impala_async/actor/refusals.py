"""What the learner refused for good of what this actor sent.

Runs on: sampler thread
"""

import logging
from functools import cache

from impala_async.wire.messages import VERDICTS, Grant

logger = logging.getLogger(__name__)


def tell_refusals(grant: Grant, env_id: str) -> None:
    """Mostly it is nobody's fault; numbers that are not finite are the environment's, or its
    policy's."""
    for seq, verdict in grant.verdicts:
        logger.debug("trajectory %d was refused: %s", seq, VERDICTS[verdict])
        if VERDICTS[verdict] == "nonfinite":
            _warn_once(
                f"the learner refuses trajectories of {env_id}: an observation, a reward or an "
                "action in them is not finite"
            )


@cache
def _warn_once(line: str) -> None:
    logger.warning("%s", line)
