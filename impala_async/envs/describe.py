"""Says what an environment looks like, also to another process, and plays a few steps of it.

What those steps find would else come to light on the actors, which start again and again, or as
data that the learner refuses for ever.

`python -m impala_async.envs.describe [SAMPLER [POLICIES]]` reads an EnvSection as JSON from stdin,
takes a PoliciesSection as JSON, and writes one line of JSON: `{"obs": ..., "action": ...}` as a
Schema has them, with `num_columns`, or `{"error": one line}` and exit code 2. The learner asks a
short-lived child, so that an environment cannot leave anything behind in it: threads, memory, an
OpenGL context, a changed random seed. `read_answer` is for the asking side, and does not import
gymnasium.

    C columns, P choices
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from impala_async import processes
from impala_async.config.actor import SamplerName
from impala_async.config.env import EnvSection
from impala_async.config.policies import ONE_POLICY, PoliciesSection
from impala_async.envs.faults import with_id
from impala_async.envs.watch import Watch, tell_stderr
from impala_async.errors import EXIT_CONFIG, EXIT_DONE, EnvError, SpacesError
from impala_async.processes import end_silently, leave
from impala_async.schema import ActionPart, ActionSpec, ObsSpec, Schema
from impala_async.trajectory import are_moderate, how_large

if TYPE_CHECKING:
    from impala_async.envs.batch import EnvBatch, Obs, Step

NUM_STEPS = 32
# An environment may be slow; then this many seconds of it must do.
BUDGET_S = 2.0


class Described(NamedTuple):
    """The spaces, and how many columns one environment makes: one for each of its agents."""

    obs: ObsSpec
    action: ActionSpec
    num_columns: int


def describe(
    section: EnvSection, sampler: SamplerName = "auto", policies: PoliciesSection = ONE_POLICY
) -> Described:
    """The environment as this sampler steps it; raises EnvError if it fails within a few steps.

    The sampler matters: an environment's own vector code may preprocess what its single one shows.
    """
    from impala_async.envs.make import build_envs

    envs = build_envs(sampler, section, 1, policies)
    try:
        try_steps(envs)
    finally:
        envs.close()
    return Described(envs.obs_spec, envs.action_spec, envs.num_envs)


def try_steps(envs: EnvBatch) -> None:
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
    """Check that stacks of frames slide; return which columns are at an end now."""
    from gymnasium.vector import AutoresetMode

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


def read_answer(answer: bytes) -> Described:
    """Return what a child wrote; raise EnvError with its error, or when it wrote no answer."""
    try:
        raw = json.loads(answer)
        if isinstance(raw, dict) and "error" in raw:
            raise EnvError(str(raw["error"]))
        whole = json.dumps({**raw, "rows": 1, "state": []}).encode()
        schema, num_columns = Schema.from_json(whole), int(raw["num_columns"])
    except (ValueError, TypeError, KeyError, SpacesError) as error:
        text = answer[:80].decode(errors="replace")
        why = (
            "it forked, and both processes went on" if answer.count(b"\n") > 1 else "it wrote there"
        )
        raise EnvError(
            f"the process that tried the environment answered nonsense, probably as {why}: {text!r}"
        ) from error
    return Described(schema.obs, schema.action, num_columns)


def main() -> int:
    """Answer on the real stdout, while whatever the environment prints goes to stderr."""
    end_silently()
    processes.hold()
    answers = os.dup(1)
    os.dup2(2, 1)
    watch = Watch(tell_stderr).start()
    answer, exit_code = _answer(sys.stdin.buffer.read(), sys.argv[1:])
    watch.close()
    os.write(answers, f"{answer}\n".encode())
    os.close(answers)
    return exit_code


def _answer(section_json: bytes, args: list[str]) -> tuple[str, int]:
    try:
        section = EnvSection.model_validate_json(section_json)
        policies = PoliciesSection.model_validate_json(args[1]) if args[1:] else ONE_POLICY
        found = describe(section, _sampler(args[:1]), policies)
    except ValidationError as error:
        first = error.errors()[0]
        return _error(f"env.{'.'.join(map(str, first['loc']))}: {first['msg']}"), EXIT_CONFIG
    except EnvError as error:
        return _error(str(with_id(error, section.id))), EXIT_CONFIG
    spaces = {"obs": asdict(found.obs), "action": asdict(found.action)}
    return json.dumps({**spaces, "num_columns": found.num_columns}), EXIT_DONE


def _sampler(args: list[str]) -> SamplerName:
    known = get_args(SamplerName)
    name = args[0] if args else "auto"
    if name not in known:
        raise EnvError(f"wants one of {', '.join(known)}, got {name}")
    return cast(SamplerName, name)


def _error(text: str) -> str:
    return json.dumps({"error": " ".join(text.split())})


if __name__ == "__main__":
    leave(main())
