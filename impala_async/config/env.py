"""The environment's section of the config."""

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from impala_async.config.section import MOST_S, Kwargs, Named, Section, unknown_name

REPEATERS = {
    "gymnasium.wrappers:RepeatAction": ("num_repeats", 1),
    "gymnasium.wrappers:MaxAndSkipObservation": ("skip", 4),
    "gymnasium.wrappers:AtariPreprocessing": ("frame_skip", 4),
}
"""Wrappers that take each action several times: the argument that says how often, its default."""


class EnvSection(Section):
    """Which environment the actors step, and how the learner gets to know its spaces."""

    id: str = Field(min_length=1)
    """Gymnasium id, or package.module:Name."""
    kwargs: Kwargs = Field(default_factory=dict)
    """Arguments of the environment."""
    wrappers: tuple[Named, ...] = ()
    """Around single environments, innermost first: package.module:Name, or a table with kwargs."""
    preprocess: Literal["auto", "off"] = "auto"
    """auto: Atari as in the papers (84 x 84 grey, four frames stacked, each action for four
    frames). off: the environment as it is."""
    frame_stack: Literal["auto", "on", "off"] = "auto"
    """Whether images are windows over frames that slide by one per step: then each frame is sent
    once. auto: Atari as it is preprocessed here."""
    action_mask_key: str | None = "auto"
    """Key of the Dict observation that says which actions are legal. auto: action_mask, if there is
    one that fits. none: no mask."""
    squash_actions: bool = False
    """Bring continuous actions into their bounds by a tanh, not by clipping."""
    last_action: bool = False
    """Show the policy its last action as well."""
    last_reward: bool = False
    """Show the policy its last reward as well."""
    num_spares: int = Field(0, ge=0, le=64)
    """For each single environment of an actor so many more. They are played in turn, an episode
    each, and reset meanwhile: no column waits for a reset that takes no longer than an episode."""
    step_timeout_s: float | None = Field(600.0, gt=0, le=MOST_S)
    """An actor whose environment takes longer than this for a step, a reset or a close ends, with
    the stack of where it stands; none: it is waited for."""
    probe: Literal["learner", "actor"] = "learner"
    """Who describes the spaces: a child of the learner, or the first actor, where only that can."""

    def broken_rules(self) -> Iterator[str]:
        if "\0" in self.id:  # it becomes part of a path
            yield f"id wants the name of an environment, got {self.id!r}"
        for wrapper in self.wrappers:
            yield from unknown_name("wrappers", wrapper.name)

    @property
    def frames_per_step(self) -> int:
        """Frames of the environment that an env step takes: more than one in ALE's games, and where
        a wrapper repeats actions. A skip that is drawn anew for every step counts as 1.
        """
        around = [(wrapper, *REPEATERS.get(wrapper.name, ("", 1))) for wrapper in self.wrappers]
        repeats = [wrapper.kwargs.get(key, usual) for wrapper, key, usual in around]
        return self._frame_skip * math.prod(each for each in repeats if isinstance(each, int))

    @property
    def _frame_skip(self) -> int:
        is_v5 = "ALE/" in self.id
        if not is_v5 and not self.id.startswith("ale_py:"):
            return 1
        # The ids of old have a skip of 1, or one that is drawn.
        default = 4 if is_v5 or self.preprocess == "auto" else 1
        skip = self.kwargs.get("frameskip", default)
        return skip if isinstance(skip, int) else 1
