"""A loaded policy on the GPU chooses as it does on the CPU."""

import numpy as np
import pytest

from impala_async import load_policy
from impala_async.envs.make import make_env
from tests.library.test_loaded_policy import CASES, begin, flat

pytestmark = pytest.mark.gpu
NUM_OBS = 200


@pytest.mark.parametrize("case", ["mlp", "cnn", "lstm", "masks", "box", "dict"])
def test_it_chooses_there_as_it_would_here(device, tmp_path, case):
    env_section, model = CASES[case]
    folder, _ = begin(tmp_path, env_section, {**model, "precision": "float32"})
    there, here = load_policy(folder.path, device=str(device)), load_policy(folder.path)
    env = make_env(folder.load_config().env)
    (raw, _), memory, reward = env.reset(seed=1), None, 0.0
    for _ in range(NUM_OBS):
        acted = there.act(raw, memory, last_reward=reward)
        expected = here.act(raw, memory, last_reward=reward)
        np.testing.assert_allclose(flat(acted.action), flat(expected.action), atol=1e-4)
        assert acted.log_prob == pytest.approx(expected.log_prob, abs=1e-4)
        memory = acted.state
        raw, reward, terminated, truncated, _ = env.step(acted.action)
        if terminated or truncated:
            (raw, _), memory, reward = env.reset(), None, 0.0
