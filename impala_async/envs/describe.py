"""Says what an environment looks like, also to another process, and plays a few steps of it.

`python -m impala_async.envs.describe` is the learner's short-lived child: an environment leaves
nothing behind in the learner, and what is wrong with it is told before any actor starts. Who asks
imports no gymnasium. C columns, P choices.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from impala_async import processes
from impala_async.config.actor import SamplerName
from impala_async.config.env import EnvSection
from impala_async.config.policies import ONE_POLICY, PoliciesSection
from impala_async.envs.faults import (
    CLOSE_S,
    Watch,
    closed_after,
    end_without_close,
    tell_stderr,
    with_id,
)
from impala_async.errors import EnvError, Exit, SpacesError
from impala_async.schema import POLICY, ActionSpec, ObsSpec, Schema
from impala_async.trajectory import are_moderate, how_large

if TYPE_CHECKING:
    from impala_async.envs.batch import EnvBatch, Obs

NUM_STEPS = 32
# An environment may be slow; then this many seconds of it must do.
BUDGET_S = 2.0


def describe(
    section: EnvSection,
    sampler: SamplerName = "auto",
    policies: PoliciesSection = ONE_POLICY,
    *,
    opened: ExitStack,
) -> dict[str, Any]:
    """The answer on an environment as this sampler steps it, until `opened` closes it; EnvError if
    it fails soon."""
    from impala_async.envs.make import build_envs
    from impala_async.envs.saved_spaces import save_spaces

    envs = build_envs(sampler, section, 1, policies, has_spares=False)
    opened.enter_context(closed_after(envs))
    try_steps(envs)
    return {**look_of(envs), "spaces": save_spaces(envs.spaces)}


def look_of(envs: EnvBatch) -> dict[str, Any]:
    """An answer: the spaces, and how many columns there are, one for each agent."""
    spaces = {"obs": asdict(envs.obs_spec), "action": asdict(envs.action_spec)}
    return {**spaces, "num_columns": envs.num_envs}


def try_steps(envs: EnvBatch) -> None:
    """Reset and step; raises EnvError, of the environment itself or for what it gave."""
    rng = np.random.default_rng(0)
    obs = envs.reset(0)
    check_numbers(envs, obs)
    is_told = _tell_outside(envs, obs)
    # Agents that are yet to come show 0, but for who plays them.
    shown = [a.reshape(envs.num_envs, -1).any(1) for name, a in obs.items() if name != POLICY]
    _check_legal(envs, obs, np.any(shown, axis=0))
    ends_at = time.monotonic() + BUDGET_S
    for _ in range(NUM_STEPS):
        step = envs.step(random_actions(envs.action_spec, obs, envs.num_envs, rng))
        obs = step.obs
        check_numbers(envs, obs, step.rewards)
        is_told = is_told or _tell_outside(envs, obs)
        # Nothing is chosen at an end, nor while others play on.
        _check_legal(envs, obs, ~(step.ended if step.idle is None else step.ended | step.idle))
        if time.monotonic() > ends_at:
            return


def random_actions(
    spec: ActionSpec, obs: Obs, num_columns: int, rng: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """Draw for each column: legal choices are equally likely, and numbers are normal."""
    scores_CP = rng.random((num_columns, spec.num_choices))
    if spec.legal is not None:
        scores_CP[obs[spec.legal].reshape(num_columns, -1) == 0] = -1.0
    items = iter(_items(spec, scores_CP))
    actions: dict[str, NDArray[Any]] = {}
    for part in spec.parts:
        shape = (num_columns, *part.shape)
        if part.choices:
            values = np.stack([next(items).argmax(1) for _ in part.choices], 1).reshape(shape)
        else:
            values = rng.standard_normal(shape)
        actions[part.name] = values.astype(part.array.dtype)
    return actions


def _items(spec: ActionSpec, values_CP: NDArray[Any]) -> list[NDArray[Any]]:
    sizes = [size for part in spec.parts for size in part.choices]
    return np.split(values_CP, np.cumsum(sizes)[:-1], axis=1) if sizes else []


def check_numbers(envs: EnvBatch, obs: Obs, rewards: NDArray[np.float32] | None = None) -> None:
    """EnvError for what a step or, without rewards, a reset gave, and a learner refuses."""
    given = {} if rewards is None else {"a reward": rewards}
    for leaf in envs.obs_spec.leaves:
        if leaf.may_be_large:
            given[f"an observation {leaf.name!r}".removesuffix(" ''")] = obs[leaf.name]
    for what, values in given.items():
        if not (is_moderate := are_moderate(values)).all():
            where, refused = "reset" if rewards is None else "step", values[~is_moderate][:1]
            size = f"{how_large(refused)}: {refused[0]:g}"
            raise EnvError(f"{envs.name}: {where} gave {what} that is {size}")


def _tell_outside(envs: EnvBatch, obs: Obs) -> bool:
    """Tell of a number outside its Box, if there is one: no error, as many overstep a little."""
    for name, box in envs.spaces.boxes.items() if envs.spaces else ():
        # Agents that are yet to come show 0.
        is_outside = ((obs[name] < box.low) | (obs[name] > box.high)) & (obs[name] != 0)
        each = np.broadcast_arrays(obs[name], box.low, box.high)
        for value, low, high in zip(*(array[is_outside] for array in each), strict=True):
            text = f"is {value}, outside its Box of {low} to {high}: it is taken as it is"
            tell_stderr(f"{envs.name}: {name or 'observation'} {text}")
            return True
    return False


def _check_legal(envs: EnvBatch, obs: Obs, is_chosen_C: NDArray[np.bool_]) -> None:
    if fault := fault_of_mask(envs.action_spec, obs, is_chosen_C):
        raise EnvError(f"{envs.name} gave {fault}")


def fault_of_mask(spec: ActionSpec, obs: Obs, is_chosen_C: NDArray[np.bool_]) -> str | None:
    """Whether a column that chooses has nothing legal to choose."""
    if spec.legal is None:
        return None
    for item_CP in _items(spec, obs[spec.legal].reshape(len(is_chosen_C), -1)):
        if not item_CP[is_chosen_C].any(1).all():
            return (
                f"a mask of legal actions, {spec.legal!r}, without any legal one: every item of an "
                "action needs at least one"
            )
    return None


def read_answer(answer: bytes) -> tuple[ObsSpec, ActionSpec, int]:
    """The spaces and the number of columns that a child wrote; EnvError if it failed, and how."""
    try:
        raw = json.loads(answer)
        if isinstance(raw, dict) and "error" in raw:
            raise EnvError(str(raw["error"]))
        whole = json.dumps({**raw, "rows": 1, "state": []}).encode()
        num_columns = int(raw["num_columns"])
        schema = Schema.from_json(whole)
    except SpacesError as error:
        raise EnvError(f"its spaces are refused: {error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise EnvError(
            "the process that tried the environment answered nonsense, probably as it forked, and "
            f"both went on, or wrote there itself: {answer[:80].decode(errors='replace')!r}"
        ) from error
    return schema.obs, schema.action, num_columns


def main() -> int:
    """Read from stdin `{"env": EnvSection, "sampler": its name, "policies": PoliciesSection}`.

    Write one line to the real stdout: the answer, or `{"error": one line}`. All that the
    environment prints goes to stderr.
    """
    processes.end_silently()
    processes.hold()
    answers = os.dup(1)
    os.dup2(2, 1)
    watch = Watch(tell_stderr, end=end_without_close).start()
    asked = json.load(sys.stdin)
    section = EnvSection.model_validate(asked["env"])
    policies = PoliciesSection.model_validate(asked["policies"])
    with ExitStack() as opened:
        try:
            answer = describe(section, asked["sampler"], policies, opened=opened)
        except EnvError as error:
            answer = {"error": " ".join(str(with_id(error, section.id)).split())}
        # A close that hangs, or ends this process, takes no answer with it.
        code = _write(answers, answer, section.id)
        watch.limit(CLOSE_S, "and is left so")
    watch.close()
    return code


def _write(answers: int, answer: dict[str, Any], env_id: str) -> int:
    """The exit code of this process, which has said what it was for."""
    try:
        os.write(answers, f"{json.dumps(answer)}\n".encode())
        os.close(answers)
    except OSError as error:
        tell_stderr(f"error: {env_id} closed a descriptor that is not its own ({error.strerror})")
        return Exit.CONFIG
    return Exit.CONFIG if "error" in answer else Exit.DONE


if __name__ == "__main__":
    processes.leave(main())
