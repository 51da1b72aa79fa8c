"""Environments for env workers, which find them by name; and a sampler that plays any batch."""

import builtins
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from bench.probes import Counting, Probe
from impala_async.config.env import EnvSection
from impala_async.config.policies import PoliciesSection
from impala_async.schema import Schema

HERE = "tests.actor.worlds"
PAIR = PoliciesSection(names=("main", "past"), copies={"past": "main"}, copy_every_updates=5)


def section(name, **settings):
    """One of these by its class, or any other by its id."""
    return EnvSection(id=f"{HERE}:{name}" if name in globals() else name, **settings)


class Masked(gym.Env[Any, Any]):
    """Random numbers of its own, a mask of actions, an episode of random length."""

    def __init__(self):
        self.observation_space = Dict(
            action_mask=Box(0, 1, (3,), np.int8), sight=Box(-9, 9, (2, 2), np.float64)
        )
        self.action_space = Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._look(), {}

    def step(self, action):
        is_over = self.np_random.random() < 0.2
        return self._look(), self.np_random.normal() + action, is_over, not is_over, {}

    def _look(self):
        mask = np.ones(3, np.int8)
        mask[self.np_random.integers(3)] = 0
        return {"action_mask": mask, "sight": self.np_random.normal(size=(2, 2))}


def short_poles(num_envs, mode="SameStep"):
    """Poles whose episodes end soon, in either mode."""

    def one():
        return gym.make("CartPole-v1", max_episode_steps=9)

    return SyncVectorEnv([one] * num_envs, autoreset_mode=AutoresetMode(mode))


class Simulator(Counting):
    """Takes its time to end, and leaves a sign that it has."""

    def __init__(self, folder, takes_s):
        super().__init__(100)
        self._folder, self._takes_s = Path(folder), takes_s

    def close(self):
        time.sleep(self._takes_s)
        (self._folder / f"{id(self)}").touch()


class Busy(Counting):
    """Computes for 3 ms in each step."""

    def step(self, action):
        until = time.process_time() + 0.003
        while time.process_time() < until:
            pass
        return super().step(action)


class Late(Counting):
    """Something happens on the step after `after` steps of its life."""

    def __init__(self, after=3, how=""):
        super().__init__(100)
        self._num_left, self.how = after, how

    def step(self, action):
        self._num_left -= 1
        if self._num_left < 0:
            self.happen()
        return super().step(action)


class Hanging(Late):
    def happen(self):
        time.sleep(1000)


class Dying(Late):
    """Takes its process with it."""

    def happen(self):
        if self.how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)


class Quitting(Late):
    """Ends its process, or means to."""

    def happen(self):
        raise getattr(builtins, self.how)


class Unmade(Probe):
    def __init__(self, how="ValueError"):
        raise getattr(builtins, how)("not today")


class Unborn(Probe):
    """Its process is killed before it is made, as by a system without memory."""

    def __init__(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Moody(Probe):
    """Looks other in every process."""

    def __init__(self):
        super().__init__(num_obs=1 + os.getpid())


class Parent(Counting):
    """Starts a process that outlives it, and would keep open whatever it inherits."""

    def __init__(self):
        super().__init__()
        self.child = subprocess.Popen(["sleep", "9"], close_fds=False)

    def close(self):
        self.child.terminate()
        # Workers are deaf to SIGTERM; a process that they start must not be.
        assert self.child.wait(2) == -signal.SIGTERM


def play(envs, num_steps, rows=8, seed=3, cuts=None):
    """Everything that a sampler makes of a batch; it is closed then. `cuts` says after each step
    whether to cut."""
    # Here, as env workers import this module, and are to have no torch.
    from tests.actor.fakes import FakePolicy, sampler_over

    num_choices = envs.action_spec.parts[0].choices[0]
    names = PAIR.names if any(leaf.name == "policy" for leaf in envs.obs_spec.leaves) else ()
    schema = Schema(envs.obs_spec, envs.action_spec, rows, policies=names)
    sampler = sampler_over(envs, schema, FakePolicy(num_choices), seed=seed, cuts=cuts)
    messages = [message for _ in range(num_steps) for message in sampler.step()]
    envs.close()
    return messages


def bytes_of(messages):
    """All that they hold."""
    return [(m.buffer.obs.tobytes(), m.buffer.small.tobytes(), m.episodes) for m in messages]


class Forking(Counting):
    """Has a child by fork, which holds on to everything, and dies in its first step."""

    def step(self, action):
        if os.fork() == 0:
            time.sleep(15)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
