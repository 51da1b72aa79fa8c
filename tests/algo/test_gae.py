"""GAE against the paper's other definition: the weighted mean of all n-step advantages."""

import numpy as np
import torch
from hypothesis import given, settings

from tests.algo.batches import LAMBDAS, batches


def by_n_step_returns(batch, t, b, lambda_):
    """(1 - lambda) sum of lambda^(n-1) A^(n), the longest one taking all weight that is left."""
    reward, discount, value, mask = (tensor[:, b].tolist() for tensor in batch[1:])
    if not mask[t]:
        return 0.0
    total, n_step_return, weight, discounting = 0.0, 0.0, 1.0, 1.0
    for i in range(t, len(reward)):
        n_step_return += discounting * reward[i]
        discounting *= discount[i]
        advantage = n_step_return + discounting * value[i + 1] - value[t]
        if i + 1 == len(reward) or not mask[i + 1] or discounting == 0:
            return float(total + weight * advantage)
        total += weight * (1 - lambda_) * advantage
        weight *= lambda_
    raise AssertionError("a column has a last row")


@settings(max_examples=150)
@given(batch=batches(), lambda_=LAMBDAS)
def test_follows_the_definition_and_has_the_targets_of_on_policy_vtrace(batch, lambda_):
    got = batch.gae(lambda_)
    num_rows, num_columns = batch.mask_TB.shape
    want = np.array(
        [
            [by_n_step_returns(batch, t, b, lambda_) for b in range(num_columns)]
            for t in range(num_rows)
        ]
    )
    np.testing.assert_allclose(got.advantages_TB, want, rtol=1e-9, atol=1e-9)
    on_policy = batch._replace(log_rhos_TB=torch.zeros_like(batch.rewards_TB))
    assert torch.equal(got.targets_TB, on_policy.vtrace(lambda_=lambda_).targets_TB)
