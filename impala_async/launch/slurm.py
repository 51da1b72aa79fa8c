"""A job of Slurm: one script, to be read and changed, that runs a learner and actors on each node.

Slurm gives nodes, and ends a job in time. It starts no task of a job again: the script does.
"""

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from impala_async.errors import ConfigError
from impala_async.files import PRIVATE, write_whole, writing

FOLDER = "slurm"
"""The script and the output of its jobs lie there, in the run folder."""
ITS_ERROR = "sbatch: error: "
# Ends of lines, other control characters, and bytes that are no text.
UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# A learner saves, and says goodbye, in less.
NOTICE_S = 180


def job_script(
    run: Path,
    learner_flags: Sequence[str],
    sbatch_flags: Sequence[str],
    program: Sequence[str],
    *,
    num_nodes: int,
    num_actors: int,
) -> str:
    """The script of a job. `program` are the words of our command, `learner_flags` say what is
    trained, `sbatch_flags` may take the place of what is asked for here; `num_actors` of a node."""
    asked = [
        f"--job-name={run.name}",
        f"--nodes={num_nodes}",
        "--ntasks-per-node=1",
        f"--signal=HUP@{NOTICE_S}",
        f"--chdir={Path.cwd()}",
        # sbatch puts the number of the job, and more, where there is a `%`.
        f"--output={str(run / FOLDER).replace('%', '%%')}/%j.out",
    ]
    # An option may have its value in the next word, and the last of two that are alike holds.
    lines = [shlex.quote(flag) for flag in asked]
    for word in sbatch_flags:
        if word.startswith("-") or len(lines) == len(asked):
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    if broken := [line for line in lines if UNFIT.search(line)]:
        # The text behind an end of a line in a path would be an option of its own.
        raise ConfigError(f"sbatch takes no such text: {broken[0]!r}: name another folder or flag")
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {line}" for line in lines),
        run=shlex.quote(str(run)),
        program=shlex.join(program),
        num_actors=num_actors,
        learner_flags=" \\\n    ".join(_pairs(learner_flags)),
    )


_SCRIPT = """\
#!/bin/bash
{options}

# The same script goes on with the run, until that is over. Add what your cluster asks for above.
run={run}

# The actors of each node, all of whose cores they may use. Each that dies is started again.
srun --overlap --wait=0 --kill-on-bad-exit=0 --cpu-bind=none \\
    {program} actors --learner "$run" --num {num_actors} &

# The learner, on the first node beside the actors of that. With 2 a setting is wrong, with 75 it is
# to be tried again. One that dies six times in a row, and trains nothing between, is given up.
trained() {{ sed 's/.*-//' "$run/last_checkpoint" 2>/dev/null; }}
in_vain=0
until before=$(trained)
    srun --overlap --cpu-bind=none --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" \\
    {program} learner --resume auto --run-dir "$run" \\
    {learner_flags}
do
    code=$?
    test $code -eq 2 && exit 2
    test "$before" = "$(trained)" || in_vain=0
    test $code -eq 75 || test $((in_vain += 1)) -lt 6 || exit $code
    sleep $((5 + 5 * in_vain))
done
"""


def _pairs(flags: Sequence[str]) -> list[str]:
    """Each flag with its value."""
    return [shlex.join(flags[at : at + 2]) for at in range(0, len(flags), 2)]


def submit(script: str, run: Path) -> tuple[str, Path]:
    """Write the script into the run folder and submit it; the words of sbatch, and the script."""
    path = run / FOLDER / "job.sh"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # The arguments of the environment are in it.
        write_whole(path, script.encode(), PRIVATE)
    try:
        done = subprocess.run(["sbatch", path], capture_output=True, check=True)
    except subprocess.CalledProcessError as error:
        # Its last line says why.
        said = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(f"sbatch refused {path}: {said.removeprefix(ITS_ERROR)}") from None
    return done.stdout.decode(errors="replace").strip(), path
