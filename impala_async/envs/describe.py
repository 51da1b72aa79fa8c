"""Says what an environment looks like, also to another process.

`python -m impala_async.envs.describe [SAMPLER [POLICIES]]` reads an EnvSection as JSON from stdin,
takes a PoliciesSection as JSON, and writes one line of JSON: `{"obs": ..., "action": ...}` as a
Schema has them, or `{"error": one line}` and exit code 2. The learner asks a short-lived child, so
that an environment cannot leave anything behind in it: threads, memory, an OpenGL context, a
changed random seed. `read_answer` is for the asking side, and does not import gymnasium.
"""

import contextlib
import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from pydantic import ValidationError

from impala_async.config_env import EnvSection
from impala_async.config_policies import ONE_POLICY, PoliciesSection
from impala_async.errors import EXIT_CONFIG, EXIT_DONE, EnvError
from impala_async.interrupts import end_silently
from impala_async.spec import ActionSpec, ObsSpec, Schema

if TYPE_CHECKING:
    from impala_async.envs.make import Sampling


def describe(
    section: EnvSection, sampler: "Sampling" = "auto", policies: PoliciesSection = ONE_POLICY
) -> tuple[ObsSpec, ActionSpec]:
    """The spaces of the environment as this sampler steps it.

    The sampler matters: an environment's own vector code may preprocess what its single one shows.
    """
    from impala_async.envs.make import build_envs

    envs = build_envs(sampler, section, 1, policies)
    envs.close()
    return envs.obs_spec, envs.action_spec


def read_answer(answer: bytes) -> tuple[ObsSpec, ActionSpec]:
    """What a child wrote, as a spec; raises EnvError with its error, or when it wrote none."""
    try:
        raw = json.loads(answer)
        if isinstance(raw, dict) and "error" in raw:
            raise EnvError(str(raw["error"]))
        whole = json.dumps({**raw, "rows": 1, "state": []}).encode()
        schema = Schema.from_json(whole)
    except (ValueError, TypeError) as error:
        text = answer[:80].decode(errors="replace")
        raise EnvError(f"the environment's probe answered nonsense: {text!r}") from error
    return schema.obs, schema.action


def main() -> int:
    """Answer on the real stdout, while whatever the environment prints goes to stderr."""
    end_silently()
    answers = os.dup(1)
    os.dup2(2, 1)
    answer, exit_code = _answer(sys.stdin.buffer.read(), sys.argv[1:])
    with contextlib.suppress(BrokenPipeError):  # who asked is gone
        os.write(answers, f"{answer}\n".encode())
    os.close(answers)
    return exit_code


def _answer(section_json: bytes, args: list[str]) -> tuple[str, int]:
    try:
        section = EnvSection.model_validate_json(section_json)
        policies = PoliciesSection.model_validate_json(args[1]) if args[1:] else ONE_POLICY
        obs, action = describe(section, _sampler(args[:1]), policies)
    except ValidationError as error:
        first = error.errors()[0]
        return _error(f"env.{'.'.join(map(str, first['loc']))}: {first['msg']}"), EXIT_CONFIG
    except EnvError as error:
        return _error(str(error)), EXIT_CONFIG
    return json.dumps({"obs": asdict(obs), "action": asdict(action)}), EXIT_DONE


def _sampler(args: list[str]) -> "Sampling":
    match args:
        case []:
            return "auto"
        case ["auto" | "serial" | "vector" as sampler]:
            return sampler
    raise EnvError(f"wants auto, serial or vector, got {' '.join(args)}")


def _error(text: str) -> str:
    return json.dumps({"error": " ".join(text.split())})


if __name__ == "__main__":
    sys.exit(main())
