"""The default and the range of every knob, and that a value out of it is named with what it got."""

import math

import pytest
from pydantic import BaseModel

from impala_async.config.load import validate_config
from impala_async.config.run import RunConfig
from impala_async.errors import ConfigError
from tests.config.made import nested

# What stands beside a value so that it is only its own range that counts.
NEEDS = {
    "model.width": {"model.name": "impala_resnet"},
    "model.core_size": {"model.core": "lstm"},
    "algorithm.lr_end": {"algorithm.schedule_env_steps": 10},
    "algorithm.entropy_cost_end": {"algorithm.schedule_env_steps": 10},
    "algorithm.schedule_env_steps": {"algorithm.lr_end": 0.0},
    "algorithm.returns": {"algorithm.name": "ppo"},
    "algorithm.clip": {"algorithm.name": "ppo"},
    "algorithm.num_minibatches": {"algorithm.name": "ppo"},
    "algorithm.is_clip": {"algorithm.name": "appo"},
    "algorithm.tau": {"algorithm.name": "appo"},
    "algorithm.target_update_every_updates": {"algorithm.name": "appo"},
    "algorithm.kl_coeff": {"algorithm.name": "appo"},
    "algorithm.kl_target": {"algorithm.name": "appo", "algorithm.kl_coeff": 1.0},
    "algorithm.optimizer_options.decay": {"algorithm.optimizer": "rmsprop"},
    "algorithm.optimizer_options.momentum": {"algorithm.optimizer": "rmsprop_tf"},
    "algorithm.optimizer_options.weight_decay": {"algorithm.optimizer": "adamw"},
    "actor.num_envs": {"learner.batch_columns": 4096},
    "learner.batch_columns": {"actor.num_envs": 1},
    "learner.init_num_passes": {"learner.num_passes": 5},
    "policies.mapping": {"policies.names": ["a", "b"]},
    "policies.train": {"policies.names": ["a", "b"]},
    "policies.copies": {"policies.names": ["a", "b"], "policies.copy_every_updates": 5},
    "policies.copy_every_updates": {"policies.names": ["a", "b"], "policies.copies": {"b": "a"}},
    "pace.lag": {"pace.mode": "lockstep"},
    "pace.on_loss": {"pace.mode": "lockstep"},
}
NAN, INF = math.nan, math.inf
POSITIVE = [0, -1, NAN, INF, "x", [], True, None]
NOT_NEGATIVE = [-0.1, NAN, INF, "x", [], False, None]
COUNT = [0, -1, 1.5, "x", [], True, None]
OPTIONAL_POSITIVE = POSITIVE[:-1]
OPTIONAL_COUNT = COUNT[:-1]

# key: (default, values that are fine, values that are not)
RANGES = {
    "seed": (0, [0, 2**31 - 1], [-1, 2**31, 1.5, "x", True, None]),
    "env.id": (..., ["CartPole-v1", "my.envs:Maze"], ["", 5, None, ["x"]]),
    "env.kwargs": ({}, [{}, {"a": [1, None]}], [None, 5, "x", [1]]),
    "env.wrappers": (
        (),
        [[], [{"name": "a.b:C", "kwargs": {"size": 2}}, {"name": "a:C", "kwargs": {}}]],
        ["a.b:C", ["C"], ["a:"], [{"name": "a:C", "kwargs": 1}], [5], 5, None],
    ),
    "env.preprocess": ("auto", ["auto", "off"], ["atari", "none", True, None]),
    "env.frame_stack": ("auto", ["auto", "on", "off"], ["yes", None]),
    "env.action_mask_key": ("auto", ["legal", None], [5, ["x"]]),
    "env.squash_actions": (False, [True, False], ["x", 2, None]),
    "env.last_action": (False, [True, False], ["x", 2, None]),
    "env.last_reward": (False, [True, False], ["x", 2, None]),
    "env.step_timeout_s": (600.0, [0.5, 1e9, None], OPTIONAL_POSITIVE),
    "env.probe": ("learner", ["learner", "actor"], ["nobody", None, 1]),
    "algorithm.name": (
        "impala",
        ["impala", "appo", "ppo", "a2c", "a.b:C"],
        ["dqn", "", "a:", "a.b", None],
    ),
    "algorithm.gamma": (0.99, [0, 0.5, 1], [-0.01, 1.01, NAN, "x", None]),
    "algorithm.lr": (5e-4, [1e-9, 1], POSITIVE),
    "algorithm.lr_end": (None, [0, 1e-5], NOT_NEGATIVE[:-1]),
    "algorithm.entropy_cost": (0.01, [0, 1], NOT_NEGATIVE),
    "algorithm.entropy_cost_end": (None, [0, 1], NOT_NEGATIVE[:-1]),
    "algorithm.schedule_env_steps": (None, [1, 10**9], OPTIONAL_COUNT),
    "algorithm.value_cost": (0.5, [0, 1], NOT_NEGATIVE),
    "algorithm.grad_clip": (40.0, [0.1, None], OPTIONAL_POSITIVE),
    "algorithm.returns": (None, ["gae", "vtrace", None], ["td", 1]),
    "algorithm.rho_bar": (1.0, [0.1, None], OPTIONAL_POSITIVE),
    "algorithm.c_bar": (1.0, [0.1, None], OPTIONAL_POSITIVE),
    "algorithm.pg_rho_bar": (1.0, [0.1, None], OPTIONAL_POSITIVE),
    "algorithm.lambda": (None, [0, 1, None], [-0.01, 1.01, NAN, "x"]),
    "algorithm.normalize_advantages": (None, [True, False, None], ["x", 2]),
    "algorithm.clip": (0.2, [0.1, 5], POSITIVE),
    "algorithm.num_minibatches": (1, [1, 16], COUNT),
    "algorithm.is_clip": (2.0, [0.1, 5], POSITIVE),
    "algorithm.tau": (1.0, [0.005, 1], [*POSITIVE, 1.01]),
    "algorithm.target_update_every_updates": (4, [1, 99], COUNT),
    "algorithm.kl_coeff": (0.0, [0, 2.5], NOT_NEGATIVE),
    "algorithm.kl_target": (0.01, [1e-4, None], OPTIONAL_POSITIVE),
    "algorithm.reward_clip": (None, ["unit", "soft_asymmetric", None], ["none", 1.0]),
    "algorithm.reward_scale": (1.0, [-1, 0.5], [0, NAN, INF, "x", None]),
    "algorithm.normalize_returns": (False, [True, False], ["x", 2, None]),
    "algorithm.reduction": ("mean", ["mean", "sum"], ["max", None]),
    "algorithm.optimizer": ("adam", ["adam", "adamw", "rmsprop", "rmsprop_tf"], ["sgd", None]),
    "algorithm.optimizer_options.eps": (None, [1e-12, 0.1, None], OPTIONAL_POSITIVE),
    "algorithm.optimizer_options.decay": (0.99, [0, 0.9], [*NOT_NEGATIVE, 1]),
    "algorithm.optimizer_options.momentum": (0.0, [0, 0.9], [*NOT_NEGATIVE, 1]),
    "algorithm.optimizer_options.weight_decay": (0.01, [0, 0.1], NOT_NEGATIVE),
    "model.name": (
        "mlp",
        ["mlp", "nature_cnn", "impala_resnet", "small_cnn", "a.b:C"],
        ["cnn", "", "a:", ":C", "a.b", "a b:C", "a:b:C", None, 5],
    ),
    "model.hidden_sizes": (
        None,
        [[1], [64, 32, 16], None],
        [[], [0], [64, -1], 64, "64", [1.5], [True]],
    ),
    "model.activation": (None, ["tanh", "relu", None], ["gelu", 1]),
    "model.width": (1, [1, 64], [*COUNT, 65]),
    "model.precision": ("auto", ["auto", "float32", "bfloat16"], ["float16", None]),
    "model.shared_torso": (None, [True, False, None], ["x", 2]),
    "model.core": (None, ["lstm", "gru", None], ["rnn", "", True]),
    "model.core_size": (256, [1, 256, 512], COUNT),
    "model.normalize_obs": (False, [True, False], ["x", 2, None]),
    "model.initial_std": (1.0, [1e-4, 7], [*POSITIVE, 1e-5, 7.1]),
    "model.state_dependent_std": (False, [True, False], ["x", 2, None]),
    "policies.names": (
        (),
        [[], ["main", "past"]],
        [["a"], ["a", "a b"], ["a", "a"], "a", 5, None, [1]],
    ),
    "policies.mapping": (
        "shuffled",
        ["shuffled", "my.module:deal"],
        ["by turns", "module.deal", None, 5],
    ),
    "policies.train": (None, [None, ["a"], ["b", "a"]], ["a", [], ["a", "a"], [1], 5]),
    "policies.copies": ({}, [{"b": "a"}], [None, 5, "a", ["a"]]),
    "policies.copy_every_updates": (None, [1, 10_000], OPTIONAL_COUNT),
    "trajectory.rows": (50, [1, 65535], [*COUNT, 65536]),
    "actor.num_envs": (8, [1, 4096], [*COUNT, 4097]),
    "actor.sampler": (
        "auto",
        ["auto", "serial", "vector", "parallel"],
        ["threads", None],
    ),
    "actor.num_workers": (None, [1, 8, None], [*OPTIONAL_COUNT, 1025]),
    "actor.device": ("auto", ["auto", "cpu", "cuda", "cuda:1"], ["gpu", "cuda:", "", None, 5]),
    "actor.threads": (1, [1, 1024], [*COUNT, 1025]),
    "actor.compress": ("auto", ["auto", "on", "off"], [True, "zstd", None]),
    "actor.reconnect_s": (60.0, [0.1], POSITIVE),
    "learner.device": ("auto", ["cpu", "cuda:1"], [None, 5]),
    "learner.threads": (1, [1, 1024], [*COUNT, 1025]),
    "learner.batch_columns": (16, [1, 4096], [*COUNT, 4097]),
    "learner.num_passes": (1, [1, 4], COUNT),
    "learner.minibatch_buffer_size": (1, [1, 4], COUNT),
    "learner.init_num_passes": (None, [1, 5, None], OPTIONAL_COUNT),
    "learner.queue_size": (2, [1, 9], COUNT),
    "learner.max_lag": (100, [1, 10_000], [*COUNT, 10_001]),
    "learner.publish_every_updates": (1, [1, 9], COUNT),
    "learner.report_every_s": (2.0, [0.01], [*POSITIVE, 0.009]),
    "learner.stuck_end_s": (60.0, [2, 1e6], [1.9, 1e7, NAN, INF, "x", None]),
    "learner.lease_s": (10.0, [1, 60], [0.9, -1, NAN, INF, "x", None]),
    "bind.data": (
        "tcp://127.0.0.1:5555",
        ["tcp://127.0.0.1:1", "tcp://*:*", "tcp://[::1]:65535", "tcp://host.example:5555"],
        [
            *("", "127.0.0.1:5555", "ipc:///tmp/x", "tcp://:5555", "tcp://host", "tcp://host:"),
            *("tcp://host:0", "tcp://host:65536", "tcp://host:x", "tcp://host:-1", "tcp://h:²"),
            *("tcp://h:٣", "tcp://h:1.5", "udp://h:5", None, 5),
            *("tcp://::1:5", "tcp://[::1:5", "tcp://[h]:5", "tcp://[]:5", "tcp://a b:5"),
            *("tcp://tcp://h:5", "tcp://h/x:5"),
        ],
    ),
    "bind.weights": ("tcp://127.0.0.1:5556", ["tcp://0.0.0.0:*"], ["tcp://host", None]),
    "pace.mode": ("async", ["async", "lockstep"], ["sync", None, 1]),
    "pace.lag": (0, [0, 1], [-1, 2, 0.5, "x", True, None]),
    "pace.on_loss": ("go_on", ["go_on", "stop"], ["wait", None, True]),
    "train.num_actors": (2, [1, 1024], [*COUNT, 1025]),
    "stop.env_steps": (None, [1, 1e6, None], OPTIONAL_COUNT),
    "stop.updates": (None, [1, None], OPTIONAL_COUNT),
    "stop.mean_return": (None, [-5, 0, 475.0, None], [NAN, INF, "x"]),
    "stop.wall_s": (None, [0.5, None], OPTIONAL_POSITIVE),
    "checkpoint.every_s": (60.0, [0.1], POSITIVE),
    "checkpoint.keep": (3, [1], COUNT),
    "report.sinks": (
        (),
        [[], [{"name": "wandb", "kwargs": {"project": "mine"}}, {"name": "a.b:C", "kwargs": {}}]],
        ["wandb", 5, None, True, [1], ["wand"], ["a/b:C"], [{"kwargs": {}}]],
    ),
}


def keys_of(section, prefix=""):
    found = {}
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= keys_of(field.annotation, f"{key}.")
        else:
            assert field.description, key
            required = field.is_required()
            found[key] = ... if required else field.get_default(call_default_factory=True)
    return found


def test_no_key_vanishes_or_changes_its_default():
    """They are used from outside: one may be added."""
    assert keys_of(RunConfig) == {key: default for key, (default, *_) in RANGES.items()}


def test_every_duration_has_a_largest_value():
    """Beyond it timers of the system overflow."""
    for key in [key for key in RANGES if key.endswith("_s")]:
        with pytest.raises(ConfigError, match=rf"^config: {key}: wants .* to 1\d+.*, got 1"):
            attempt(key, 1e12)


def attempt(key, value):
    return validate_config(nested({"env.id": "X", **NEEDS.get(key, {}), key: value}))


@pytest.mark.parametrize("key", RANGES)
def test_values_that_are_fine_and_values_that_are_not(key):
    _, good, bad = RANGES[key]
    for value in good:
        config = attempt(key, value)
        stored = config.model_dump(by_alias=True)
        for part in key.split("."):
            stored = stored[part]
        assert stored == (tuple(value) if isinstance(value, list) else value)
        assert validate_config(config.model_dump(mode="json", by_alias=True)) == config
    section, _, leaf = key.rpartition(".")
    for value in bad:
        with pytest.raises(ConfigError) as caught:
            attempt(key, value)
        text = str(caught.value)
        # Which field, and what it got.
        assert key in text or (f"config: {section}: " in text and leaf in text), value
        assert "got" in text
        # In a user's words, and not in pydantic's.
        assert "Input should" not in text
        assert " valid " not in text
