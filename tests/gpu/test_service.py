"""Whole runs of a learner on a GPU: accounts close, whatever updates are made of."""

import pytest

from impala_async.errors import Exit
from tests.learner.service_run import service_run
from tests.learner.test_service import check_end

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "learner",
    [
        {},
        {"num_passes": 3, "minibatch_buffer_size": 2, "publish_every_updates": 2},
    ],
)
@pytest.mark.parametrize("algorithm", [{}, {"name": "appo", "kl_coeff": 0.0}])
async def test_a_run_to_its_goal(device, tmp_path, learner, algorithm):
    sections = {"learner": {**learner, "device": str(device)}, "algorithm": algorithm}
    async with service_run(tmp_path, stop={"env_steps": 2400}, **sections) as run:
        await run.start_actors(2)
        assert await run.end() == Exit.DONE
    last = check_end(run, "env_steps")
    assert last["env_steps_trained"] >= 2400
    assert last["trajectories/rejected"] == 0
