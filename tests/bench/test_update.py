"""The benchmark of the update measures the ways that a device has, and says how long they take."""

from pathlib import Path

import pytest
import torch

from bench import update
from bench.learner import CARTPOLE, CONFIGS, ENDLESS, PONG, loop
from bench.learner_ends import record
from bench.update import figures_of, ways_of
from impala_async.config.load import load_config


def test_a_graph_is_measured_only_where_there_is_one():
    assert ways_of("cpu") == ["off", "inductor"]
    assert ways_of("cuda") == ["off", "inductor", "cuda_graph"]


def test_speed_is_over_the_plain_way_of_the_same_round():
    plain = [{"updates_per_s": rate, "update_ms": 1000 / rate} for rate in (100.0, 50.0, 10.0)]
    fast = [{"updates_per_s": rate, "first_s": 9.0} for rate in (200.0, 75.0, 30.0)]
    first, speed, wait = figures_of(CARTPOLE, {"off": plain, "inductor": fast})
    assert (first.median, first.unit) == (20, "ms")
    assert (speed.median, speed.smallest, speed.largest) == (2, 1.5, 3)
    assert (wait.median, wait.unit) == (9, "s")


def test_compiled_code_is_kept_by_nothing_but_a_case(tmp_path, monkeypatch):
    """So the first turn is that of a machine which has never compiled, and the others are not."""
    caches = []

    def noted(*told, **environment):
        caches.append(Path(environment["TORCHINDUCTOR_CACHE_DIR"]))
        return {}

    monkeypatch.setattr(update, "record", lambda *told: None)
    monkeypatch.setattr(update, "loop", noted)
    for case in (CARTPOLE, PONG):
        update.measure(case, tmp_path, ways_of("cpu"), 2, 1.0)
    assert len(caches) == 8
    first, second = caches[:4], caches[4:]
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]
    assert all(cache.parent == tmp_path and not list(cache.iterdir()) for cache in caches)
    # The compiler is called with it.
    assert not any(" " in cache.name for cache in caches)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    path = tmp_path_factory.mktemp("update") / "recording"
    record(path, CONFIGS / CARTPOLE.config, [*ENDLESS, "stop.env_steps=2000"])
    return path


@pytest.mark.e2e
def test_a_way_is_measured(recording):
    config = load_config(CONFIGS / CARTPOLE.config, [*ENDLESS, "learner.device=cpu"])
    sample = loop("step", recording, config, 0.1)
    assert sample["updates_per_s"] > 1
    assert sample["first_s"] > 0


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, a graph is recorded")
def test_what_was_made_in_another_way_is_not_published(recording, capfd):
    config = load_config(CONFIGS / CARTPOLE.config, [*ENDLESS, "learner.compile=cuda_graph"])
    with pytest.raises(SystemExit, match="step ended with exit code 1"):
        loop("step", recording, config, 0.1)
    told = capfd.readouterr().err
    assert "no CUDA graph: the learner is on cpu" in told
    assert "learner.compile is cuda_graph, and updates were made as with off" in told
