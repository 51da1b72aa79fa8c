"""IMPALA in one file, to be read from top to bottom (arXiv 1802.01561).

    actor threads                                     main thread
    envs ─► policy ─► trajectory ──► queue ──►   batch ─► V-trace ─► loss ─► update
              ▲                                                                │
              └────────────────────────── newest weights ◄─────────────────────┘

Actors run ahead with weights that are some updates old, and V-trace corrects for that. Needs torch,
numpy and gymnasium, and nothing of impala_async, which does the same mathematics between processes
and hosts; a test holds the two equal.

    python examples/minimal_impala.py        CartPole-v1 to a mean return of 475

A trajectory has T action rows and S = T + 1 observation rows; row T only bootstraps, and is row 0
of the actor's next trajectory. After an episode's end gymnasium shows its final observation in one
more row, whose action does nothing but reset. That row is no transition: its mask is False.

Shapes: T, S rows; C columns (environments) of an actor, B columns of a batch; A actions; F features
"""

import argparse
import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Settings:
    env_id: str = "CartPole-v1"
    seed: int = 0
    num_actors: int = 2
    num_envs: int = 8  # C, of each actor
    rows: int = 50  # T
    messages_per_batch: int = 2  # B = messages_per_batch * C
    queue_size: int = 2  # trajectories that may wait: more would only make them older
    gamma: float = 0.99
    lr: float = 2e-3  # falls to 0 over `lr_env_steps`
    lr_env_steps: int = 400_000
    entropy_cost: float = 0.01
    value_cost: float = 0.5
    grad_clip: float = 0.5
    reward_scale: float = 0.1  # in the loss, never in the returns that are shown
    goal_return: float = 475.0  # mean of 100 episodes
    max_env_steps: int = 400_000


def mlp(num_in: int, num_out: int, last_gain: float) -> nn.Sequential:
    layers = [nn.Linear(num_in, 64), nn.Linear(64, 64), nn.Linear(64, num_out)]
    for layer, gain in zip(layers, (math.sqrt(2), math.sqrt(2), last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class ActorCritic(nn.Module):
    """A policy and a value, each a network of its own."""

    def __init__(self, num_features: int, num_actions: int) -> None:
        super().__init__()
        self.policy = mlp(num_features, num_actions, 0.01)  # nearly uniform at first
        self.value = mlp(num_features, 1, 1.0)

    def log_probs(self, obs_F: Tensor) -> Tensor:
        logits_A: Tensor = self.policy(obs_F)
        return logits_A.log_softmax(-1)


def make_model(settings: Settings) -> ActorCritic:
    env = gym.make(settings.env_id)
    assert isinstance(env.observation_space, gym.spaces.Box)
    assert isinstance(env.action_space, gym.spaces.Discrete)
    return ActorCritic(env.observation_space.shape[0], int(env.action_space.n))


# -------------------- the actor


class Rows(NamedTuple):
    """Trajectories side by side, time-major."""

    obs_SB: Tensor  # [S, B, F]
    actions_TB: Tensor
    log_probs_TB: Tensor  # of those actions, by the policy that took them
    rewards_TB: Tensor
    terminated_TB: Tensor  # a truncation needs no flag: the mask of the row after it is enough
    mask_TB: Tensor


# The newest weights: the learner replaces them, actors look where a trajectory begins.
Newest = deque[tuple[int, dict[str, Tensor]]]


class Message(NamedTuple):
    rows: Rows
    update: int  # the weights that acted
    returns: list[float]  # of the episodes that ended in it


class Actor:
    """Steps C environments, one trajectory after the other."""

    def __init__(self, settings: Settings, number: int) -> None:
        self.settings = settings
        self.model = make_model(settings)
        self.generator = torch.Generator().manual_seed(1000 * settings.seed + number)
        self.envs = gym.make_vec(settings.env_id, settings.num_envs, vectorization_mode="sync")
        obs, _ = self.envs.reset(seed=1_000_000 * settings.seed + 1000 * number)
        self.obs_C = torch.as_tensor(obs, dtype=torch.float32)
        self.is_over_C = np.zeros(settings.num_envs, np.bool_)  # the next step only resets
        self.totals_C = np.zeros(settings.num_envs)

    def run(self, newest: Newest, out: "queue.Queue[Message]", stopping: threading.Event) -> None:
        while not stopping.is_set():
            update, weights = newest[-1]
            self.model.load_state_dict(weights)
            out.put(self.unroll(update))  # waits while the queue is full

    @torch.no_grad()
    def unroll(self, update: int) -> Message:
        num_rows, shape_TC = self.settings.rows, (self.settings.rows, self.settings.num_envs)
        rows = Rows(
            obs_SB=torch.empty(num_rows + 1, *self.obs_C.shape),
            actions_TB=torch.zeros(shape_TC, dtype=torch.int64),
            log_probs_TB=torch.zeros(shape_TC),
            rewards_TB=torch.zeros(shape_TC),
            terminated_TB=torch.zeros(shape_TC, dtype=torch.bool),
            mask_TB=torch.ones(shape_TC, dtype=torch.bool),
        )
        returns: list[float] = []
        for t in range(num_rows):
            log_probs_CA = self.model.log_probs(self.obs_C)
            actions_C1 = torch.multinomial(log_probs_CA.exp(), 1, generator=self.generator)
            log_probs_C1 = log_probs_CA.gather(-1, actions_C1)
            obs, rewards, terminated, truncated, _ = self.envs.step(actions_C1[:, 0].numpy())
            valid_C = torch.from_numpy(~self.is_over_C)
            rows.obs_SB[t] = self.obs_C
            rows.mask_TB[t] = valid_C
            rows.actions_TB[t] = torch.where(valid_C, actions_C1[:, 0], 0)
            rows.log_probs_TB[t] = torch.where(valid_C, log_probs_C1[:, 0], 0.0)
            rows.rewards_TB[t] = torch.from_numpy(rewards)  # gymnasium gives 0 where it resets
            rows.terminated_TB[t] = torch.from_numpy(terminated)
            self.obs_C = torch.as_tensor(obs, dtype=torch.float32)
            self.is_over_C = terminated | truncated
            self.totals_C += rewards
            returns += self.totals_C[self.is_over_C].tolist()
            self.totals_C[self.is_over_C] = 0
        rows.obs_SB[num_rows] = self.obs_C
        return Message(rows, update, returns)


# -------------------- the mathematics


@torch.no_grad()
def vtrace(
    log_rhos_TB: Tensor,
    rewards_TB: Tensor,
    discounts_TB: Tensor,
    values_SB: Tensor,
    mask_TB: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute what the values should have been, and advantages for the policy; every bar is 1.

    Nothing accumulates on a masked row, so no correction flows from an episode into the one before.
    But its value, which is V(final observation), bootstraps the row before it if that was cut.
    """
    rhos_TB = log_rhos_TB.clamp(-20, 20).exp().clamp(max=1)
    values_TB = values_SB[:-1]
    deltas_TB = rhos_TB * (rewards_TB + discounts_TB * values_SB[1:] - values_TB)
    deltas_TB = torch.where(mask_TB, deltas_TB, 0)
    carries_TB = torch.where(mask_TB, discounts_TB * rhos_TB, 0)
    accs_TB = torch.zeros_like(deltas_TB)
    acc_B = torch.zeros_like(deltas_TB[0])
    for t in reversed(range(len(deltas_TB))):
        acc_B = deltas_TB[t] + carries_TB[t] * acc_B
        accs_TB[t] = acc_B
    targets_TB = values_TB + accs_TB
    next_targets_TB = torch.cat([targets_TB[1:], values_SB[-1:]])
    advantages_TB = rhos_TB * (rewards_TB + discounts_TB * next_targets_TB - values_TB)
    return targets_TB, torch.where(mask_TB, advantages_TB, 0)


def impala_losses(model: ActorCritic, rows: Rows, settings: Settings) -> tuple[Tensor, ...]:
    """The terms of policy, values and entropy: means over the valid rows, with their weights."""
    mask_TB = rows.mask_TB
    log_probs_TBA = model.log_probs(rows.obs_SB[:-1])
    log_probs_TB = log_probs_TBA.gather(-1, rows.actions_TB.unsqueeze(-1)).squeeze(-1)
    entropies_TB = -(log_probs_TBA.exp() * log_probs_TBA).sum(-1)
    values_SB = model.value(rows.obs_SB).squeeze(-1)
    targets_TB, advantages_TB = vtrace(
        log_rhos_TB=log_probs_TB - rows.log_probs_TB,
        rewards_TB=rows.rewards_TB * settings.reward_scale,
        discounts_TB=settings.gamma * (~rows.terminated_TB).to(values_SB.dtype),
        values_SB=values_SB,
        mask_TB=mask_TB,
    )

    def mean(losses_TB: Tensor) -> Tensor:
        return torch.where(mask_TB, losses_TB, 0).sum() / mask_TB.sum().clamp(min=1)

    return (
        -mean(log_probs_TB * advantages_TB),
        0.5 * settings.value_cost * mean((targets_TB - values_SB[:-1]).square()),
        -settings.entropy_cost * mean(entropies_TB),
    )


class Learner:
    """Owns the weights and their optimizer, and counts what they were trained on."""

    def __init__(self, settings: Settings, model: ActorCritic) -> None:
        self.settings = settings
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr, eps=1e-5)
        self.env_steps = self.update = 0

    def learn(self, rows: Rows) -> None:
        self.env_steps += int(rows.mask_TB.sum())
        left = max(0.0, 1 - self.env_steps / self.settings.lr_env_steps)
        self.optimizer.param_groups[0]["lr"] = self.settings.lr * left
        self.optimizer.zero_grad()
        torch.stack(impala_losses(self.model, rows, self.settings)).sum().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)
        self.optimizer.step()
        self.update += 1

    def publish(self, newest: Newest) -> None:
        state = self.model.state_dict()
        newest.append((self.update, {name: tensor.clone() for name, tensor in state.items()}))

    def run(self, newest: Newest, next_message: Callable[[], Message]) -> list[float]:
        """Train until the goal is reached or the steps are used up; the returns of all episodes."""
        returns: list[float] = []
        while True:
            parts = [next_message() for _ in range(self.settings.messages_per_batch)]
            lag = self.update - min(part.update for part in parts)
            columns = zip(*(part.rows for part in parts), strict=True)
            self.learn(Rows(*(torch.cat(tensors, dim=1) for tensors in columns)))
            self.publish(newest)
            returns += [total for part in parts for total in part.returns]
            mean = float(np.mean(returns[-100:])) if len(returns) >= 100 else math.nan
            is_out_of_steps = self.env_steps >= self.settings.max_env_steps
            is_last = is_out_of_steps or mean >= self.settings.goal_return
            if is_last or self.update % 20 == 0:
                print(f"steps {self.env_steps:7,}  lag {lag}  return {mean:5.1f}", flush=True)
            if is_last:
                return returns


def next_of(inbox: "queue.Queue[Message]", actors: "list[Future[None]]") -> Message:
    """Wait for a message; raise what killed an actor instead of waiting for ever."""
    while True:
        try:
            return inbox.get(timeout=1.0)
        except queue.Empty:
            for actor in actors:
                if actor.done():
                    actor.result()


def train(settings: Settings) -> list[float]:
    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)
    learner, newest = Learner(settings, make_model(settings)), Newest(maxlen=1)
    learner.publish(newest)
    inbox: queue.Queue[Message] = queue.Queue(settings.queue_size)
    stopping = threading.Event()
    actors = [Actor(settings, number) for number in range(settings.num_actors)]
    with ThreadPoolExecutor(len(actors)) as pool:
        runs = [pool.submit(actor.run, newest, inbox, stopping) for actor in actors]
        try:
            return learner.run(newest, lambda: next_of(inbox, runs))
        finally:
            stopping.set()
            while not all(run.done() for run in runs):
                with contextlib.suppress(queue.Empty):
                    inbox.get(timeout=0.1)  # an actor may be waiting for a place


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="IMPALA in one file.")
    parser.add_argument("--env-id", default=Settings.env_id)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    started_s = time.monotonic()
    train(Settings(**vars(parser.parse_args())))
    print(f"{time.monotonic() - started_s:.1f} s")
