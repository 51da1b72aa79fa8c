"""Two games of a few lines whose optimum is known, played by a policy straight into batches."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from impala_async.config.algorithm import AlgorithmSection
from impala_async.config.run import ModelSection
from impala_async.policy import Policy
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.training.batch import Batch
from impala_async.training.step import UpdateStep

NUM_ROWS, NUM_COLUMNS = 8, 16
RIGHT = np.array([2, 0, 3, 1])
SCHEMA = Schema(
    ObsSpec((ArraySpec("", (4,), "float32"),)),
    ActionSpec((ActionPart("", "discrete", (4,)),)),
    rows=NUM_ROWS,
)
ONE_HOT = np.eye(4, dtype=np.float32)

Play = Callable[[Policy, np.random.Generator, torch.Generator], Batch]


def bandit(policy: Policy, rng: np.random.Generator, source: torch.Generator) -> Batch:
    """Four contexts, four actions, one of them right in each; every row its own game."""
    contexts_BS = rng.integers(0, 4, (NUM_COLUMNS, NUM_ROWS + 1))
    return _batch(
        policy, source, contexts_BS, lambda a_BT, t: a_BT[:, t] == RIGHT[contexts_BS[:, t]]
    )


def delayed(policy: Policy, rng: np.random.Generator, source: torch.Generator) -> Batch:
    """Contexts 0 and 1 begin an episode: the action there is paid for one row later, in context 2.

    Row 2 of 3 is the final observation, which is no transition.
    """
    contexts_BS = np.tile(np.arange(NUM_ROWS + 1) % 3 + 1, (NUM_COLUMNS, 1))
    is_start_BS = contexts_BS == 1
    contexts_BS[is_start_BS] = rng.integers(0, 2, int(is_start_BS.sum()))

    def pays(actions_BT: NDArray[np.int32], t: int) -> NDArray[np.bool_]:
        is_paid = t % 3 == 1
        return is_paid & (actions_BT[:, t - 1] == RIGHT[contexts_BS[:, t - 1]])

    ends_T = np.arange(NUM_ROWS) % 3 == 1
    is_final_T = np.arange(NUM_ROWS) % 3 == 2
    return _batch(policy, source, contexts_BS, pays, ends_T, is_final_T)


def _batch(
    policy: Policy,
    source: torch.Generator,
    contexts_BS: NDArray[np.int64],
    pays: Callable[[NDArray[np.int32], int], NDArray[np.bool_]],
    ends_T: NDArray[np.bool_] | None = None,
    is_final_T: NDArray[np.bool_] | None = None,
) -> Batch:
    obs_BS = ONE_HOT[contexts_BS]
    action = policy.act({"": obs_BS[:, :-1].reshape(-1, 4)}, {}, source)
    shape = (NUM_COLUMNS, NUM_ROWS)
    actions_BT = action.actions[""].reshape(shape)
    none_T = np.zeros(NUM_ROWS, np.bool_)
    rewards_BT = np.stack([pays(actions_BT, t) for t in range(NUM_ROWS)], 1).astype(np.float32)

    def rows(flags_T: NDArray[np.bool_] | None) -> torch.Tensor:
        return torch.from_numpy(np.tile(none_T if flags_T is None else flags_T, (NUM_COLUMNS, 1)))

    return Batch(
        obs={"": torch.from_numpy(obs_BS)},
        actions={"": torch.from_numpy(actions_BT)},
        state={},
        rewards_BT=torch.from_numpy(rewards_BT),
        log_probs_BT=torch.from_numpy(action.log_probs.reshape(shape)),
        terminated_BT=rows(ends_T),
        truncated_BT=rows(None),
        mask_BT=~rows(is_final_T),
    )


def trained(
    play: Play,
    algorithm: dict[str, object],
    *,
    seed: int,
    num_batches: int,
    num_passes: int = 1,
    reward_factor: float = 1.0,
) -> Policy:
    """A policy after so many batches of its own play."""
    policy = Policy(SCHEMA, ModelSection(hidden_sizes=(32,)), seed=seed)
    step = UpdateStep(policy, AlgorithmSection.model_validate(algorithm), "cpu")
    rng, source = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    alive_B = torch.ones(NUM_COLUMNS, dtype=torch.bool)
    for number in range(num_batches):
        batch = play(policy, rng, source)
        batch.rewards_BT.mul_(reward_factor)
        for index in range(num_passes):
            assert step.run(batch, alive_B, number * 128, is_first_pass=index == 0).applied
    return policy


def probabilities(policy: Policy) -> NDArray[np.float64]:
    """Of the right action, for each context."""
    obs_BS = torch.from_numpy(ONE_HOT).unsqueeze(1).expand(4, 2, 4)
    actions = {"": torch.from_numpy(RIGHT).unsqueeze(1)}
    with torch.no_grad():
        evaluation = policy.evaluate({"": obs_BS}, actions, torch.ones(4, 1) > 0, {})
    return np.exp(evaluation.log_probs_TB[0].double().numpy())


def values(policy: Policy) -> list[float]:
    with torch.no_grad():
        return policy.model({"": torch.from_numpy(ONE_HOT)})[1].tolist()
