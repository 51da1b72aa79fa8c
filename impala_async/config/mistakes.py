"""How a mistake in a config is told: its source, its key, what it got and what it wants.

Stable-Baselines3, CleanRL, PufferLib, Sample Factory and RLlib have names of their own for our
settings. None of them is accepted: a mistake is answered with them. A name of theirs that only one
key of ours has too, like `gamma`, needs no entry.
"""

import difflib
import json
import math
import typing
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, TypeGuard

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from impala_async.config.run import RunConfig

MAX_SHOWN = 200
# The key that says most in a section, which a value for the section itself is meant for.
NAMED_BY = {"env": "id", "algorithm": "name", "model": "name", "pace": "mode", "bind": "data"}
SYNONYMS = {
    "bind.data": "bind address port host listen",
    "env.id": "env env_id env_name environment",
    "env.kwargs": "env_kwargs env_config",
    "env.frame_stack": "env_framestack framestack",
    "algorithm.name": "algo algorithm",
    "algorithm.lr": "learning_rate alpha",
    "algorithm.lr_end": "lr_schedule anneal_lr",
    "algorithm.entropy_cost": "ent_coef entropy_coef entropy_coeff exploration_loss_coeff",
    "algorithm.entropy_cost_end": "entropy_coeff_schedule",
    "algorithm.value_cost": "vf_coef vf_loss_coeff value_loss_coef value_loss_coeff baseline_cost",
    "algorithm.grad_clip": "max_grad_norm grad_norm_clipping",
    "algorithm.gamma": "discount discounting",
    "algorithm.lambda": "gae_lambda lambda_",
    "algorithm.returns": "with_vtrace vtrace",
    "algorithm.rho_bar": "vtrace_rho vtrace_clip_rho_threshold",
    "algorithm.pg_rho_bar": "vtrace_clip_pg_rho_threshold",
    "algorithm.c_bar": "vtrace_c",
    "algorithm.clip": "clip_range clip_coef clip_param ppo_clip_ratio",
    "algorithm.kl_target": "target_kl",
    "algorithm.kl_coeff": "use_kl_loss kl_loss_coeff",
    "algorithm.target_update_every_updates": "target_network_update_freq",
    "algorithm.num_minibatches": "num_batches_per_epoch minibatch_size sgd_minibatch_size",
    "algorithm.normalize_advantages": "normalize_advantage norm_adv",
    "algorithm.optimizer": "opt_type use_rms_prop",
    "algorithm.optimizer_options.eps": "epsilon adam_eps rms_prop_eps",
    "model.name": "policy network encoder_conv_architecture",
    "model.hidden_sizes": "net_arch fcnet_hiddens encoder_mlp_layers hidden_size policy_kwargs",
    "model.activation": "activation_fn fcnet_activation nonlinearity",
    "model.core": "use_lstm use_rnn rnn_type",
    "model.core_size": "lstm_cell_size rnn_size lstm_hidden_size",
    "model.shared_torso": "vf_share_layers actor_critic_share_weights",
    "model.normalize_obs": "normalize_input observation_filter norm_obs",
    "model.initial_std": "initial_stddev log_std_init",
    "trajectory.rows": "n_steps num_steps rollout rollout_fragment_length rollout_length "
    "unroll_length horizon bptt_horizon",
    "actor.num_envs": "n_envs num_envs_per_worker num_envs_per_env_runner",
    "actor.sampler": "vec_env_cls worker_num_splits",
    "train.num_actors": "num_env_runners num_rollout_workers",
    "learner.device": "device cuda gpu num_gpus num_gpus_per_learner",
    "learner.batch_columns": "batch_size train_batch_size train_batch_size_per_learner",
    "learner.num_passes": "epochs n_epochs num_epochs update_epochs num_sgd_iter",
    "learner.max_lag": "max_policy_lag",
    "learner.queue_size": "learner_queue_size",
    "learner.publish_every_updates": "broadcast_interval",
    "pace.mode": "async_rl",
    "stop.env_steps": "total_timesteps total_steps train_for_env_steps timesteps timesteps_total "
    "num_env_steps_sampled_lifetime steps max_steps",
    "stop.updates": "training_iteration num_updates",
    "stop.wall_s": "train_for_seconds time_total_s",
    "stop.mean_return": "episode_reward_mean episode_return_mean reward_threshold",
    "checkpoint.every_s": "save_every_sec",
    "checkpoint.keep": "keep_checkpoints",
}
"""Keys of ours, each with the names of others that it is asked for by."""

_OURS = {name: key for key, names in SYNONYMS.items() for name in names.split()}


def explain(detail: dict[str, Any], sources: Mapping[str, str]) -> str:
    """Tell one of pydantic's: source, dotted key, what is wanted, what it got."""
    key = ".".join(part for part in detail["loc"] if isinstance(part, str))
    source, given, hint = source_of(key, sources), detail["input"], ""
    if detail["type"] == "extra_forbidden":
        within = next(iter(given), "") if isinstance(given, dict) else ""
        meant = key_like(key) or key_like(f"{key}.{within}")
        return f"{source}: {key}: unknown key" + (f"; did you mean {meant}?" if meant else "")
    if detail["type"] == "missing":
        if key in ("env", "env.id"):
            key = "env.id"
            hint = ' (for example --set env.id=CartPole-v1, or id = "CartPole-v1" in section [env])'
        return f"{source}: {key}: required{hint}"
    if detail["type"] == "value_error":
        message = detail["msg"].removeprefix("Value error, ")
        place = f"{source}: {key}: " if key else f"{source}: "
        return "\n".join(place + line for line in message.splitlines())
    item = "".join(f"[{part}]" for part in detail["loc"] if isinstance(part, int))
    field = dict(fields_of(RunConfig)).get(key)
    wanted = f"wants {_wanted(field, is_item=bool(item))}" if field else detail["msg"]
    if key in NAMED_BY and isinstance(given, str | int):
        hint = f"; did you mean {key}.{NAMED_BY[key]}={given}?"
    return f"{source}: {key}{item}: {wanted}, got {shown(given)}{hint}"


def source_of(key: str, sources: Mapping[str, str]) -> str:
    """Where a key and all that lies in it was set, or else what it lies in."""
    within = {
        source for each, source in sources.items() if not key or f"{each}.".startswith(f"{key}.")
    }
    while key and not within:
        key = key.rpartition(".")[0]
        within = {sources[key]} if key in sources else set()
    return " and ".join(sorted(within)) or "config"


def _wanted(field: FieldInfo, *, is_item: bool) -> str:
    """Say what a key of ours takes, or an item of it, in a user's words."""
    kinds = [field.annotation]
    if typing.get_origin(field.annotation) in (UnionType, typing.Union):
        kinds = [kind for kind in typing.get_args(field.annotation) if kind is not NoneType]
    or_none = ", or none" if NoneType in typing.get_args(field.annotation) and not is_item else ""
    kind = typing.get_args(kinds[0])[0] if is_item else kinds[0]
    return _wanted_kind(kind, field) + or_none


def _wanted_kind(kind: Any, field: FieldInfo) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        *others, last = args
        return f"{', '.join(others)} or {last}" if others else str(last)
    if origin is tuple:
        example = ["main", "past"] if args[0] is str else [64, 64]
        return f"a list, for example {json.dumps(field.default or example)}"
    if origin is dict:
        entry = '{past = "main"}' if args[1] is str else "{size = 5}"
        return f"a table, for example {entry}"
    if is_section(kind):
        return "keys of its own, not a value"
    if kind is str:
        return (
            "text that is not empty"
            if any(hasattr(each, "min_length") for each in field.metadata)
            else "text"
        )
    if kind is bool:
        return "true or false"
    return ("a whole number" if kind is int else "a number") + _range(field)


def _range(field: FieldInfo) -> str:
    """The bounds of a number, as far as it has any."""
    words = {"ge": "from", "gt": "over", "le": "to", "lt": "below"}
    bounds = {
        name: getattr(bound, name)
        for bound in field.metadata
        for name in words
        # Beyond such a bound is no number that anybody means.
        if abs(getattr(bound, name, math.inf)) < 1e30
    }
    text = "".join(f" {words[name]} {bound}" for name, bound in bounds.items())
    return f"{text} up" if bounds.keys() == {"ge"} else text


def shown(value: Any) -> str:
    if value is None:
        return "none"
    text = json.dumps(value, default=str)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def key_like(key: str) -> str | None:
    """The key that was meant: one of that name elsewhere, others' word for it, or one like it."""
    typed, key = key, key.lower().replace("-", "_")
    section, _, name = key.rpartition(".")
    fields = dict(fields_of(RunConfig))
    keys = [key for key, field in fields.items() if not is_section(field.annotation)]
    if key in fields and key != typed:
        return key
    named_so = [k for k in keys if k.rpartition(".")[2] == name]
    near = difflib.get_close_matches(key, named_so, n=1, cutoff=0.0)
    # As `env.name` is others' `env_name`, which says more than a name alone.
    if section and (ours := _OURS.get(f"{section}_{name}")):
        return ours
    if (ours := _OURS.get(name)) and not (section and near):
        return ours
    if section:
        near = near or _named_like(name, [k for k in keys if k.rpartition(".")[0] == section])
    else:
        near = near or difflib.get_close_matches(key, fields.keys() - keys, n=1, cutoff=0.8)
    if not section or section in fields:
        near = near or _named_like(name, keys, 0.75)
    return near[0] if near else None


def _named_like(name: str, keys: list[str], cutoff: float = 0.6) -> list[str]:
    """At most one, by its name alone: with its section others would look alike."""
    names = [key.rpartition(".")[2] for key in keys]
    near = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return [keys[names.index(found)] for found in near]


def is_section(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def fields_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        yield key, field
        if is_section(field.annotation):
            yield from fields_of(field.annotation, f"{key}.")
