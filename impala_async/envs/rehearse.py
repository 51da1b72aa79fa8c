"""Plays a few steps at random before anybody trains, so that a broken environment is named at once.

What it finds would else come to light on the actors, which start again and again, or as data that
the learner refuses for ever.

C columns
"""

import time
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from impala_async.envs.vector import EnvBatch, Obs, Step
from impala_async.errors import EnvError
from impala_async.spec import ActionPart, ActionSpec
from impala_async.trajectory import are_moderate, how_large

NUM_STEPS = 32
# An environment may be slow; then this many seconds of it must do.
BUDGET_S = 2.0


def rehearse(envs: EnvBatch) -> None:
    """Reset and step; raises EnvError, of the environment itself or for what it gave."""
    rng = np.random.default_rng(0)
    obs = envs.reset(0)
    check_obs_numbers(envs, obs, "reset")
    _check_legal(envs, obs, np.ones(envs.num_envs, np.bool_), "reset")
    obs = {name: values.copy() for name, values in obs.items()}
    is_over_C = np.zeros(envs.num_envs, np.bool_)
    ends_at = time.monotonic() + BUDGET_S
    for _ in range(NUM_STEPS):
        step = envs.step(random_actions(envs.action_spec, obs, envs.num_envs, rng))
        _check_step(envs, step)
        is_over_C = _check_slides(envs, obs, step, is_over_C)
        obs = {name: values.copy() for name, values in step.obs.items()}
        if time.monotonic() > ends_at:
            return


def random_actions(
    spec: ActionSpec, obs: Obs, num_columns: int, rng: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """For each column, legal choices alike likely, and normal numbers."""
    legal_CP = None if spec.legal is None else obs[spec.legal].reshape(num_columns, -1) != 0
    actions: dict[str, NDArray[Any]] = {}
    start = 0
    for part in spec.parts:
        if part.choices:
            scores_CP = rng.random((num_columns, sum(part.choices)))
            if legal_CP is not None:
                scores_CP[~legal_CP[:, start : start + sum(part.choices)]] = -1.0
            start += sum(part.choices)
            actions[part.name] = _choose(part, scores_CP)
        else:
            numbers = rng.standard_normal((num_columns, *part.shape))
            actions[part.name] = numbers.astype(part.array.dtype)
    return actions


def _choose(part: ActionPart, scores_CP: NDArray[np.float64]) -> NDArray[Any]:
    """The choice with the highest score, for each item."""
    items = np.split(scores_CP, np.cumsum(part.choices)[:-1], axis=1)
    chosen = np.stack([item.argmax(1) for item in items], 1)
    return chosen.reshape(len(scores_CP), *part.shape).astype(part.array.dtype)


def _check_step(envs: EnvBatch, step: Step) -> None:
    check_numbers(envs, step)
    # Nothing is chosen at an end, nor while others play on.
    is_chosen_C = ~(step.terminated | step.truncated)
    if step.idle is not None:
        is_chosen_C &= ~step.idle
    _check_legal(envs, step.obs, is_chosen_C, "step")


def check_numbers(envs: EnvBatch, step: Step) -> None:
    """EnvError for a reward or an observation that a learner refuses."""
    is_moderate_C = are_moderate(step.rewards)
    if not is_moderate_C.all():
        refused = step.rewards[~is_moderate_C][:1]
        raise EnvError(
            f"{envs.name}: step gave a reward that is {how_large(refused)}: {refused[0]:g}"
        )
    check_obs_numbers(envs, step.obs, "step")


def check_obs_numbers(envs: EnvBatch, obs: Obs, where: str) -> None:
    """The same for what a step or a reset showed."""
    for leaf in envs.obs_spec.leaves:
        name, values = leaf.name, obs[leaf.name]
        if leaf.may_be_large and not are_moderate(values).all():
            which = f"observation {name!r}" if name else "observation"
            raise EnvError(f"{envs.name}: {where} gave an {which} that is {how_large(values)}")


def _check_legal(envs: EnvBatch, obs: Obs, is_chosen_C: NDArray[np.bool_], where: str) -> None:
    spec = envs.action_spec
    if spec.legal is None:
        return
    flat_CP = obs[spec.legal].reshape(envs.num_envs, -1) != 0
    sizes = [size for part in spec.parts for size in part.choices]
    for item_CP in np.split(flat_CP, np.cumsum(sizes)[:-1], axis=1):
        if not item_CP[is_chosen_C].any(1).all():
            raise EnvError(
                f"{envs.name}: {where} gave a mask of legal actions, {spec.legal!r}, without any "
                "legal one: every item of an action needs at least one"
            )


def _check_slides(
    envs: EnvBatch, before: Obs, step: Step, was_over_C: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Of stacks of frames; returns which columns are at an end now."""
    is_over_C = step.terminated | step.truncated
    # Behind an end a new window begins: with this step, or with the one after it.
    is_begun_C = is_over_C if envs.autoreset is AutoresetMode.SAME_STEP else was_over_C
    if step.idle is not None:  # those show the same again, and so may one that goes
        is_begun_C = is_begun_C | step.idle | is_over_C
    for leaf in envs.obs_spec.leaves:
        window, last = step.obs[leaf.name][~is_begun_C], before[leaf.name][~is_begun_C]
        if leaf.is_stack and not np.array_equal(window[:, :-1], last[:, 1:]):
            raise EnvError(
                f"env.frame_stack: what {envs.name} shows does not slide by one frame per step, "
                "and what does not would be lost: set it to off"
            )
    return is_over_C
