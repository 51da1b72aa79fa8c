"""Scripts of jobs, run by bash with a fake srun, and submitted to a fake sbatch."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from impala_async.errors import ConfigError
from impala_async.launch import slurm

# It notes the words of each step; of the learner's it ends with the next code of a list.
# Its line is one write: the learner's and the actors' may come at once.
SRUN = """#!/bin/sh
python3 -c 'import json, os, sys
os.write(1, f"{json.dumps(sys.argv[1:])}\\n".encode())' "$@" >> steps
case "$*" in
  *" actors "*) exit 0 ;;
esac
read -r code < codes && sed -i 1d codes
exit "$code"
"""
SBATCH = """#!/bin/sh
cp "$1" submitted
echo "$SAYS"
echo "sbatch: error: first" >&2
echo "sbatch: error: no such partition" >&2
exit "$CODE"
"""


@pytest.fixture
def make_commands(tmp_path, monkeypatch):
    """Puts scripts on the PATH; waits between two tries are none."""

    def make(**scripts):
        for name, text in {**scripts, "sleep": "#!/bin/sh\n"}.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return make


def job(*sbatch_flags, run="/shared/mine", flags=("--config", "a b.toml", "--set", "x=*")):
    return slurm.job_script(
        Path(run), flags, sbatch_flags, ["my python", "-m", "it"], num_nodes=3, num_actors=2
    )


def options(script):
    marked = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    return [line.removeprefix("#SBATCH ") for line in marked]


def test_options_of_sbatch_come_last_each_with_its_value(monkeypatch, tmp_path):
    ours = options(job())
    assert "--nodes=3" in ours
    assert "--job-name=mine" in ours
    assert f"--chdir={Path.cwd()}" in ours
    flags = ("-p", "gpu", "--time=1:00", "--exclusive", "--comment", "two words")
    theirs = ["-p gpu", "--time=1:00", "--exclusive", "--comment 'two words'"]
    assert options(job(*flags)) == [*ours, *theirs]


def test_a_folder_is_a_name_to_sbatch_and_never_more():
    assert "'--job-name=two\u3000words'" in options(job(run="/shared/two\u3000words"))
    assert "--output=/shared/100%%/%%j/slurm/%j.out" in options(job(run="/shared/100%/%j"))
    for run in ("/shared/a\n#SBATCH --wrap=evil", "/shared/\udcff"):
        with pytest.raises(
            ConfigError, match=r"^sbatch takes no such text: .*--job-name"
        ) as caught:
            job(run=run)
        assert str(caught.value).isprintable()


@pytest.mark.parametrize(("codes", "ends"), [("0", 0), ("137 70 75 0", 0), ("137 2", 2)])
def test_a_job_starts_its_learner_again_unless_a_setting_is_wrong(codes, ends, make_commands):
    make_commands(srun=SRUN)
    Path("codes").write_text(codes.replace(" ", "\n") + "\n")
    environment = {**os.environ, "SLURMD_NODENAME": "first"}
    done = subprocess.run(
        ["bash", "-u"], input=job(run="/a b/mine").encode(), env=environment, timeout=20
    )
    assert done.returncode == ends
    steps = [json.loads(line) for line in Path("steps").read_text().splitlines()]
    learners = [step for step in steps if "learner" in step]
    actors = [step for step in steps if "actors" in step]
    assert len(learners) == len(codes.split())
    run = "/a b/mine"
    trains = ["--config", "a b.toml", "--set", "x=*"]
    for step in learners:
        assert {"--nodes=1", "--ntasks=1", "--nodelist=first"} <= {*step}
        at = step.index("my python")
        assert step[at:] == [
            *("my python", "-m", "it", "learner", "--resume", "auto", "--run-dir", run),
            *trains,
        ]
    ours = ["my python", "-m", "it", "actors", "--learner", run, "--num", "2"]
    assert all(step[step.index("my python") :] == ours for step in actors)


@pytest.mark.parametrize(
    ("saves", "num_starts"),
    # Other epochs of the same update are nothing new.
    [("ckpt-$n-7", 7), ("ckpt-1-$n", 9)],
)
def test_a_learner_that_dies_and_trains_nothing_is_given_up(saves, num_starts, make_commands):
    saving = f"""n=$(wc -l < codes)
echo {saves} > mine/last_checkpoint
read -r code"""
    make_commands(srun=SRUN.replace("read -r code", saving))
    Path("mine").mkdir()
    Path("mine/last_checkpoint").write_text("ckpt-1-7")
    codes = ["70", "75", *["70"] * 6, "0"]
    Path("codes").write_text("\n".join(codes) + "\n")
    environment = {**os.environ, "SLURMD_NODENAME": "first"}
    done = subprocess.run(["bash", "-u"], input=job(run="mine").encode(), env=environment)
    assert done.returncode == int(codes[num_starts - 1])
    steps = [json.loads(line) for line in Path("steps").read_text().splitlines()]
    assert sum("learner" in step for step in steps) == num_starts


def test_a_script_is_kept_in_the_run_folder_and_submitted(make_commands, monkeypatch):
    make_commands(sbatch=SBATCH)
    monkeypatch.setenv("SAYS", "Submitted batch job 7")
    monkeypatch.setenv("CODE", "0")
    said, path = slurm.submit("the script", Path("run").absolute())
    assert (said, path) == ("Submitted batch job 7", Path("run/slurm/job.sh").absolute())
    assert Path("submitted").read_text() == "the script" == path.read_text()
    # Arguments of environments may be secret.
    assert path.stat().st_mode & 0o077 == 0


def test_a_job_that_is_refused_and_a_folder_that_cannot_be_are_one_line(make_commands, monkeypatch):
    make_commands(sbatch=SBATCH)
    monkeypatch.setenv("CODE", "1")
    with pytest.raises(ConfigError, match=r"^sbatch refused run/slurm/job.sh: no such partition$"):
        slurm.submit("", Path("run"))
    with pytest.raises(ConfigError, match=r"^--run-dir: cannot write to events/slurm: Not a dir"):
        slurm.submit("", Path("events"))
