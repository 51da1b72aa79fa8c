"""The range of every knob, and that a value out of it is named with what it got."""

import math

import pytest

from impala_async.config.load import validate_config
from impala_async.config.run import RunConfig
from impala_async.errors import ConfigError
from tests.config.test_run import DEFAULTS, nested

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

# key: (values that are fine, values that are not)
RANGES = {
    "seed": ([0, 2**31 - 1], [-1, 2**31, 1.5, "x", True, None]),
    "env.id": (["CartPole-v1", "my.envs:Maze"], ["", 5, None, ["x"]]),
    "env.kwargs": ([{}, {"a": [1, None]}], [None, 5, "x", [1]]),
    "env.wrappers": (
        [[], [{"name": "a.b:C", "kwargs": {"size": 2}}, {"name": "a:C", "kwargs": {}}]],
        ["a.b:C", ["C"], ["a:"], [{"name": "a:C", "kwargs": 1}], [5], 5, None],
    ),
    "env.preprocess": (["auto", "off"], ["atari", "none", True, None]),
    "env.frame_stack": (["auto", "on", "off"], ["yes", None]),
    "env.action_mask_key": (["legal", None], [5, ["x"]]),
    "env.squash_actions": ([True, False], ["x", 2, None]),
    "env.last_action": ([True, False], ["x", 2, None]),
    "env.last_reward": ([True, False], ["x", 2, None]),
    "env.step_timeout_s": ([0.5, 1e9, None], OPTIONAL_POSITIVE),
    "env.probe": (["learner", "actor"], ["nobody", None, 1]),
    "algorithm.name": (["impala", "appo", "ppo", "a2c", "a.b:C"], ["dqn", "", "a:", "a.b", None]),
    "algorithm.gamma": ([0, 0.5, 1], [-0.01, 1.01, NAN, "x", None]),
    "algorithm.lr": ([1e-9, 1], POSITIVE),
    "algorithm.lr_end": ([0, 1e-5], NOT_NEGATIVE[:-1]),
    "algorithm.entropy_cost": ([0, 1], NOT_NEGATIVE),
    "algorithm.entropy_cost_end": ([0, 1], NOT_NEGATIVE[:-1]),
    "algorithm.schedule_env_steps": ([1, 10**9], OPTIONAL_COUNT),
    "algorithm.value_cost": ([0, 1], NOT_NEGATIVE),
    "algorithm.grad_clip": ([0.1, None], OPTIONAL_POSITIVE),
    "algorithm.returns": (["gae", "vtrace", None], ["td", 1]),
    "algorithm.rho_bar": ([0.1, None], OPTIONAL_POSITIVE),
    "algorithm.c_bar": ([0.1, None], OPTIONAL_POSITIVE),
    "algorithm.pg_rho_bar": ([0.1, None], OPTIONAL_POSITIVE),
    "algorithm.lambda": ([0, 1, None], [-0.01, 1.01, NAN, "x"]),
    "algorithm.normalize_advantages": ([True, False, None], ["x", 2]),
    "algorithm.clip": ([0.1, 5], POSITIVE),
    "algorithm.num_minibatches": ([1, 16], COUNT),
    "algorithm.is_clip": ([0.1, 5], POSITIVE),
    "algorithm.tau": ([0.005, 1], [*POSITIVE, 1.01]),
    "algorithm.target_update_every_updates": ([1, 99], COUNT),
    "algorithm.kl_coeff": ([0, 2.5], NOT_NEGATIVE),
    "algorithm.kl_target": ([1e-4, None], OPTIONAL_POSITIVE),
    "algorithm.reward_clip": (["unit", "soft_asymmetric", None], ["none", 1.0]),
    "algorithm.reward_scale": ([-1, 0.5], [0, NAN, INF, "x", None]),
    "algorithm.normalize_returns": ([True, False], ["x", 2, None]),
    "algorithm.reduction": (["mean", "sum"], ["max", None]),
    "algorithm.optimizer": (["adam", "adamw", "rmsprop", "rmsprop_tf"], ["sgd", None]),
    "algorithm.optimizer_options.eps": ([1e-12, 0.1, None], OPTIONAL_POSITIVE),
    "algorithm.optimizer_options.decay": ([0, 0.9], [*NOT_NEGATIVE, 1]),
    "algorithm.optimizer_options.momentum": ([0, 0.9], [*NOT_NEGATIVE, 1]),
    "algorithm.optimizer_options.weight_decay": ([0, 0.1], NOT_NEGATIVE),
    "model.name": (
        ["mlp", "nature_cnn", "impala_resnet", "small_cnn", "a.b:C"],
        ["cnn", "", "a:", ":C", "a.b", "a b:C", "a:b:C", None, 5],
    ),
    "model.hidden_sizes": (
        [[1], [64, 32, 16], None],
        [[], [0], [64, -1], 64, "64", [1.5], [True]],
    ),
    "model.activation": (["tanh", "relu", None], ["gelu", 1]),
    "model.width": ([1, 64], [*COUNT, 65]),
    "model.precision": (["auto", "float32", "bfloat16"], ["float16", None]),
    "model.shared_torso": ([True, False, None], ["x", 2]),
    "model.core": (["lstm", "gru", None], ["rnn", "", True]),
    "model.core_size": ([1, 256, 512], COUNT),
    "model.normalize_obs": ([True, False], ["x", 2, None]),
    "model.initial_std": ([1e-4, 7], [*POSITIVE, 1e-5, 7.1]),
    "model.state_dependent_std": ([True, False], ["x", 2, None]),
    "policies.names": (
        [[], ["main", "past"]],
        [["a"], ["a", "a b"], ["a", "a"], "a", 5, None, [1]],
    ),
    "policies.mapping": (["shuffled", "my.module:deal"], ["by turns", "module.deal", None, 5]),
    "policies.train": ([None, ["a"], ["b", "a"]], ["a", [], ["a", "a"], [1], 5]),
    "policies.copies": ([{"b": "a"}], [None, 5, "a", ["a"]]),
    "policies.copy_every_updates": ([1, 10_000], OPTIONAL_COUNT),
    "trajectory.rows": ([1, 65535], [*COUNT, 65536]),
    "actor.num_envs": ([1, 4096], [*COUNT, 4097]),
    "actor.sampler": (
        ["auto", "serial", "vector", "parallel"],
        ["threads", "central", None],
    ),
    "actor.num_workers": ([1, 8, None], [*OPTIONAL_COUNT, 1025]),
    "actor.device": (["auto", "cpu", "cuda", "cuda:1"], ["gpu", "cuda:", "", None, 5]),
    "actor.threads": ([1, 1024], [*COUNT, 1025]),
    "actor.compress": (["auto", "on", "off"], [True, "zstd", None]),
    "actor.reconnect_s": ([0.1], POSITIVE),
    "learner.device": (["cpu", "cuda:1"], [None, 5]),
    "learner.threads": ([1, 1024], [*COUNT, 1025]),
    "learner.compile": (["off", "inductor"], ["on", True, None]),
    "learner.batch_columns": ([1, 4096], [*COUNT, 4097]),
    "learner.num_passes": ([1, 4], COUNT),
    "learner.minibatch_buffer_size": ([1, 4], COUNT),
    "learner.init_num_passes": ([1, 5, None], OPTIONAL_COUNT),
    "learner.queue_size": ([1, 9], COUNT),
    "learner.max_lag": ([1, 10_000], [*COUNT, 10_001]),
    "learner.publish_every_updates": ([1, 9], COUNT),
    "learner.report_every_s": ([0.01], [*POSITIVE, 0.009]),
    "learner.max_skipped_in_a_row": ([1, 10_000], COUNT),
    "learner.stuck_dump_s": ([2, 59], [1.9, 1e7, NAN, INF, "x", None]),
    "learner.stuck_end_s": ([31, 1e6], [1.9, 1e7, NAN, INF, "x", None]),
    "learner.lease_s": ([1, 60], [0.9, -1, NAN, INF, "x", None]),
    "bind.data": (
        ["tcp://127.0.0.1:1", "tcp://*:*", "tcp://[::1]:65535", "tcp://host.example:5555"],
        [
            *("", "127.0.0.1:5555", "ipc:///tmp/x", "tcp://:5555", "tcp://host", "tcp://host:"),
            *("tcp://host:0", "tcp://host:65536", "tcp://host:x", "tcp://host:-1", "tcp://h:²"),
            *("tcp://h:٣", "tcp://h:1.5", "udp://h:5", None, 5),
            *("tcp://::1:5", "tcp://[::1:5", "tcp://[h]:5", "tcp://[]:5", "tcp://a b:5"),
            *("tcp://tcp://h:5", "tcp://h/x:5"),
        ],
    ),
    "bind.weights": (["tcp://0.0.0.0:*"], ["tcp://host", None]),
    "pace.mode": (["async", "lockstep"], ["sync", None, 1]),
    "pace.lag": ([0, 1], [-1, 2, 0.5, "x", True, None]),
    "pace.on_loss": (["go_on", "stop"], ["wait", None, True]),
    "train.num_actors": ([1, 1024], [*COUNT, 1025]),
    "stop.env_steps": ([1, 1e6, None], OPTIONAL_COUNT),
    "stop.updates": ([1, None], OPTIONAL_COUNT),
    "stop.mean_return": ([-5, 0, 475.0, None], [NAN, INF, "x"]),
    "stop.wall_s": ([0.5, None], OPTIONAL_POSITIVE),
    "checkpoint.every_s": ([0.1], POSITIVE),
    "checkpoint.keep": ([1], COUNT),
    "report.sinks": (
        [[], [{"name": "wandb", "kwargs": {"project": "mine"}}, {"name": "a.b:C", "kwargs": {}}]],
        ["wandb", 5, None, True, [1], ["wand"], ["a/b:C"], [{"kwargs": {}}]],
    ),
}


def test_every_key_has_a_range_here_and_a_description():
    assert list(RANGES) == list(DEFAULTS)
    for section in RunConfig.model_fields.values():
        fields = getattr(section.annotation, "model_fields", {"": section})
        assert all(field.description for field in fields.values())


def test_every_duration_has_a_largest_value():
    """Beyond it timers of the system overflow."""
    for key in [key for key in RANGES if key.endswith("_s")]:
        with pytest.raises(ConfigError, match=rf"^config: {key}: wants .* to 1\d+.*, got 1"):
            attempt(key, 1e12)


def attempt(key, value):
    return validate_config(nested({"env.id": "X", **NEEDS.get(key, {}), key: value}))


@pytest.mark.parametrize("key", RANGES)
def test_values_that_are_fine_and_values_that_are_not(key):
    good, bad = RANGES[key]
    for value in good:
        stored = attempt(key, value).model_dump(by_alias=True)
        for part in key.split("."):
            stored = stored[part]
        assert stored == (tuple(value) if isinstance(value, list) else value)
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
