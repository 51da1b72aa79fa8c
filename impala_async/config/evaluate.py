"""The `[evaluate]` section: when a run is evaluated while it trains, and how."""

from typing import Literal

from pydantic import Field

from impala_async.config.section import MOST_S, Section


class EvaluateSection(Section):
    """Evaluations while a run trains, by a process of the learner's. The best weights stay."""

    every_s: float | None = Field(None, gt=0, le=MOST_S)
    """Seconds from one evaluation to the next, if it takes no longer; none: there are none."""
    episodes: int = Field(10, ge=1)
    """Episodes of each agent, or a few more, with the same seeds each time."""
    actions: Literal["greedy", "sampled", "both"] = "greedy"
    """The likeliest actions, or sampled ones as in training. both: the greedy return decides what
    is best."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of actions that are played, the one first that decides."""
        return ("greedy", "sampled") if self.actions == "both" else (self.actions,)
