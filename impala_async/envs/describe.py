"""Says what an environment looks like, also to another process.

`python -m impala_async.envs.describe [SAMPLER [POLICIES]]` reads an EnvSection as JSON from stdin,
takes a PoliciesSection as JSON, and writes one line of JSON: `{"obs": ..., "action": ...}` as a
Schema has them, with `num_columns`, or `{"error": one line}` and exit code 2. The learner asks a
short-lived child, so that an environment cannot leave anything behind in it: threads, memory, an
OpenGL context, a changed random seed. `read_answer` is for the asking side, and does not import
gymnasium.
"""

import json
import os
import sys
from dataclasses import asdict
from typing import NamedTuple, cast, get_args

from pydantic import ValidationError

from impala_async import lifeline
from impala_async.config.actor import SamplerName
from impala_async.config.env import EnvSection
from impala_async.config.policies import ONE_POLICY, PoliciesSection
from impala_async.envs.faults import with_id
from impala_async.envs.watch import Watch, tell_stderr
from impala_async.errors import EXIT_CONFIG, EXIT_DONE, EnvError
from impala_async.interrupts import end_silently
from impala_async.leaving import leave
from impala_async.spec import ActionSpec, ObsSpec, Schema


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
    from impala_async.envs.rehearse import rehearse

    envs = build_envs(sampler, section, 1, policies)
    try:
        rehearse(envs)
    finally:
        envs.close()
    return Described(envs.obs_spec, envs.action_spec, envs.num_envs)


def read_answer(answer: bytes) -> Described:
    """What a child wrote; raises EnvError with its error, or when it wrote none."""
    try:
        raw = json.loads(answer)
        if isinstance(raw, dict) and "error" in raw:
            raise EnvError(str(raw["error"]))
        whole = json.dumps({**raw, "rows": 1, "state": []}).encode()
        schema, num_columns = Schema.from_json(whole), int(raw["num_columns"])
    except (ValueError, TypeError, KeyError) as error:
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
    lifeline.hold()
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
