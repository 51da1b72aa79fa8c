"""A bare training loop, and the product's update alone, over one batch of a recording.

`python -m bench.bare_loop bare|step RECORDING SETTINGS SECONDS` prints its rate as a line of JSON.
The loop is written by hand: its batch lies ready on the device, with rewards clipped and stacks
unfolded, and each turn is forward, V-trace, loss, backward, clip and optimizer step. Nothing is
checked, kept or reported. Network, V-trace and optimizer are the product's: both compute the same.

    B columns of a batch, T action rows, S = T+1 observation rows, A actions
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from impala_async.algo.vtrace import vtrace
from impala_async.config.algorithm import AlgorithmSection
from impala_async.config.load import validate_config
from impala_async.config.run import RunConfig
from impala_async.learner.build import build_step, pick_device
from impala_async.learner.loader import make_current
from impala_async.models.torso import pick_precision
from impala_async.policy import Policy
from impala_async.processes import keep_freed_memory
from impala_async.replay.index import RecordingIndex
from impala_async.training.batch import Batch
from impala_async.training.optimizer import build_optimizer
from impala_async.training.rewards import clip_rewards
from impala_async.training.step import UpdateStep

WARM_UPDATES = 10
# Updates between two looks at the clock, for which a GPU must be waited for.
TIMED_TOGETHER = {"cpu": 5, "cuda": 100}


class BareLoop:
    """IMPALA on one batch with one discrete action, again and again."""

    def __init__(self, policy: Policy, algorithm: AlgorithmSection, batch: Batch) -> None:
        self._model, self._section = policy.model, algorithm
        self._entropy_cost = algorithm.entropy_cost_of(policy.action_spec.num_choices)
        self._parameters = tuple(policy.model.parameters())
        self._optimizer = build_optimizer(self._parameters, algorithm)
        self._obs = {name: leaf.flatten(0, 1) for name, leaf in batch.rows_of_obs().items()}
        (actions_BT,) = batch.actions.values()
        self._actions_BT1 = actions_BT.long().unsqueeze(-1)
        self._mask_TB = batch.mask_BT.t().contiguous()
        self._valid_TB = self._mask_TB.float()
        self._num_valid = self._valid_TB.sum()
        self._behaviour_TB = torch.where(self._mask_TB, batch.log_probs_BT.t(), 0.0)
        rewards_BT = clip_rewards(batch.rewards_BT, algorithm.reward_clip) * algorithm.reward_scale
        self._rewards_TB = torch.where(self._mask_TB, rewards_BT.t(), 0.0)
        self._discounts_TB = algorithm.gamma * (~batch.terminated_BT).t().float()

    def update(self) -> None:
        """One turn."""
        logits_NA, values_N = self._model(self._obs)
        num_columns = len(self._actions_BT1)
        logits_BSA = logits_NA.view(num_columns, -1, logits_NA.shape[-1])
        log_probs_BTA = logits_BSA[:, :-1].log_softmax(-1)
        chosen_TB = log_probs_BTA.gather(-1, self._actions_BT1).squeeze(-1).t()
        entropies_TB = -(log_probs_BTA.exp() * log_probs_BTA).sum(-1).t()
        total = self._loss(chosen_TB, entropies_TB, values_N.view(num_columns, -1).t())
        self._optimizer.zero_grad()
        total.backward()
        if self._section.grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._section.grad_clip)
        self._optimizer.step()

    def _loss(self, log_probs_TB: Tensor, entropies_TB: Tensor, values_SB: Tensor) -> Tensor:
        section = self._section
        returns = vtrace(
            log_rhos_TB=log_probs_TB.detach() - self._behaviour_TB,
            rewards_TB=self._rewards_TB,
            discounts_TB=self._discounts_TB,
            values_SB=values_SB,
            mask_TB=self._mask_TB,
            rho_bar=section.rho_bar,
            c_bar=section.c_bar,
            pg_rho_bar=section.pg_rho_bar,
            lambda_=section.trace_decay,
        )
        errors_TB = returns.targets_TB - values_SB[:-1]
        losses_TB = (
            0.5 * section.value_cost * errors_TB.square()
            - log_probs_TB * returns.advantages_TB
            - self._entropy_cost * entropies_TB
        )
        return (losses_TB * self._valid_TB).sum() / self._num_valid


def build(kind: str, index: RecordingIndex, config: RunConfig) -> Callable[[], object]:
    """Updates as the learner of these settings would make them, or by hand."""
    device = pick_device(config.learner.device)
    batch = first_batch(index, config.learner.batch_columns, device)
    if kind == "bare":
        policy = Policy(index.schema, config.model, seed=config.seed, device=device)
        policy.compute_in(pick_precision(config.model.precision, config.model.name, device))
        return BareLoop(policy, config.algorithm, batch).update
    step, _ = build_step(config, index.schema, device)
    assert isinstance(step, UpdateStep), "a recording of several policies is not measured here"
    alive_B = torch.ones(len(batch.mask_BT), dtype=torch.bool)
    return lambda: step.run(batch, alive_B, 0)


def first_batch(index: RecordingIndex, num_columns: int, device: torch.device) -> Batch:
    """The first so many columns of a recording; a short one is taken over again."""
    layout = index.schema.layout
    obs: list[np.ndarray] = []
    small: list[np.ndarray] = []
    number = found = 0
    while found < num_columns:
        message = index.message(number % len(index))
        body, columns = np.frombuffer(message.body, np.uint8), message.data.columns
        middle = columns * layout.obs_bytes
        obs.append(body[:middle].reshape(columns, -1))
        small.append(body[middle : middle + columns * layout.small_bytes].reshape(columns, -1))
        number, found = number + 1, found + columns
    planes = (torch.from_numpy(np.concatenate(plane)[:num_columns]) for plane in (obs, small))
    return Batch.in_planes(index.schema, *(plane.to(device) for plane in planes))


def wait_for(device: torch.device) -> None:
    """Wait until all that was launched there is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(update: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Updates per second."""
    for _ in range(WARM_UPDATES):
        update()
    wait_for(device)
    together = TIMED_TOGETHER[device.type]
    begun, num_updates, spent_s = time.perf_counter(), 0, 0.0
    while spent_s < seconds:
        for _ in range(together):
            update()
        num_updates += together
        wait_for(device)
        spent_s = time.perf_counter() - begun
    return num_updates / spent_s


def main() -> None:
    # As the learner does.
    keep_freed_memory()
    kind, recording, settings, seconds = sys.argv[1:]
    config = validate_config(json.loads(settings))
    torch.set_num_threads(config.learner.threads)
    device = pick_device(config.learner.device)
    make_current(device)
    update = build(kind, RecordingIndex(Path(recording)), config)
    rate = measure(update, float(seconds), device)
    print(json.dumps({"updates_per_s": rate, "update_ms": 1000 / rate}), flush=True)


if __name__ == "__main__":
    main()
