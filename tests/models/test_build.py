"""A model is built from its section, with torch's default generator as the only randomness."""

import torch

from impala_async.config import ModelSection
from impala_async.models.build import build_model
from impala_async.spec import ActionPart, ActionSpec, ArraySpec, ObsSpec

OBS = ObsSpec((ArraySpec("", (3,), "float32"),))
ACTION = ActionSpec((ActionPart("", "discrete", (2,)),))


def weights_of(seed, section):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return list(build_model(section, OBS, ACTION).parameters())


def test_one_seed_gives_one_model_and_another_seed_another():
    section = ModelSection()
    first, same, other = (weights_of(seed, section) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_section_decides_widths_and_torsos():
    shapes = [tuple(p.shape) for p in weights_of(0, ModelSection(hidden_sizes=(5,)))]
    assert shapes.count((5, 3)) == 2
    shared = ModelSection(hidden_sizes=(5,), shared_torso=True)
    assert [tuple(p.shape) for p in weights_of(0, shared)].count((5, 3)) == 1
