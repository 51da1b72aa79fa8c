"""A user's own loss, torso, wrapper and sink, all by name: those that the pages show, put into a
folder of their own."""

import re
from pathlib import Path

import pytest

from tests.e2e.harness import module

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
# Where each part is shown.
SHOWN = {
    "imitation": "docs/models.md",
    "Shaped": "docs/environments.md",
    "Returns": "docs/metrics.md",
}


def block_with(name):
    """The block of a page that defines it."""
    blocks = re.findall(r"(?s)```python\n(.*?)```", (ROOT / SHOWN[name]).read_text("utf-8"))
    (block,) = (block for block in blocks if re.search(rf"(?m)^(class|def) {name}\b", block))
    return block


def test_the_parts_that_the_pages_show_make_a_run(site):
    package = site.folder / "mine" / "inner"
    package.mkdir(parents=True)
    for name in SHOWN:
        (package / f"{name.lower()}.py").write_text(block_with(name))
    torso = (ROOT / "examples/custom_model.py").read_text("utf-8")
    summary = site.trained(
        "env.id=CartPole-v1",
        "algorithm.name=mine.inner.imitation:imitation",
        "model.name=torso:MyTorso",
        "model.hidden_sizes=[16]",
        'env.wrappers=[{name="mine.inner.shaped:Shaped", kwargs={scale=0.5}}]',
        'report.sinks=[{name="mine.inner.returns:Returns", kwargs={name="returns.txt"}}]',
        "stop.env_steps=5000",
        "train.num_actors=1",
        **module(site.folder, "torso", torso),
    )
    assert summary["exit_reason"] == "env_steps"
    *_, last = (site.run_dir / "returns.txt").read_text().splitlines()
    report = site.reports()[-1]
    assert last.split() == [str(report["env_steps_trained"]), str(report["mean_return"])]
    # Half of what CartPole gives for each step; the last interval may be too short for an end.
    report = next(each for each in site.reports() if each["episodes/return_mean"] is not None)
    assert report["episodes/return_mean"] == pytest.approx(report["episodes/length_mean"] / 2)
