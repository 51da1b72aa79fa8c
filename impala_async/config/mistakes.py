"""How a mistake in a config is told: its source, its key, what it got and what it wants.

The names that Stable-Baselines3, CleanRL, PufferLib, Sample Factory and RLlib have for our settings
are not accepted, but answered with ours. One like `gamma`, which is a key of ours, needs no entry.
"""

import contextlib
import difflib
import json
import math
import typing
from collections.abc import Iterator, Mapping
from types import NoneType
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
    "env.kwargs": "env_kwargs env_config frameskip frame_skip env_frameskip",
    "env.wrappers": "wrapper_class env_wrapper action_repeat repeat_action num_repeats",
    "algorithm.name": "algo algorithm",
    "algorithm.lr": "learning_rate alpha",
    "algorithm.lr_end": "lr_schedule anneal_lr",
    "algorithm.entropy_cost": "ent_coef entropy_coef entropy_coeff exploration_loss_coeff",
    "algorithm.value_cost": "vf_coef vf_loss_coeff value_loss_coef value_loss_coeff baseline_cost",
    "algorithm.grad_clip": "max_grad_norm grad_norm_clipping",
    "algorithm.grad_clip_by": "clip_grad_value grad_clip_value",
    "algorithm.reward_clip": "clip_rewards clip_reward reward_clipping",
    "algorithm.gamma": "discount discounting",
    "algorithm.lambda": "gae_lambda lambda_",
    "algorithm.returns": "with_vtrace vtrace",
    "algorithm.rho_bar": "vtrace_rho vtrace_clip_rho_threshold",
    "algorithm.clip": "clip_range clip_coef clip_param ppo_clip_ratio",
    "algorithm.num_minibatches": "num_batches_per_epoch batch_size minibatch_size "
    "sgd_minibatch_size",
    "algorithm.shuffle_rows": "shuffle_minibatches shuffle_batch_per_epoch shuffle",
    "algorithm.normalize_advantages": "normalize_advantage norm_adv",
    "algorithm.intrinsic_reward": "curiosity rnd icm exploration_config with_rnd int_coef",
    "algorithm.optimizer_options.eps": "epsilon adam_eps rms_prop_eps",
    "model.name": "policy network encoder_conv_architecture",
    "model.hidden_sizes": "net_arch fcnet_hiddens encoder_mlp_layers hidden_size policy_kwargs",
    "model.activation": "activation_fn fcnet_activation nonlinearity",
    "model.core": "use_lstm use_rnn rnn_type",
    "model.core_size": "lstm_cell_size rnn_size lstm_hidden_size",
    "model.shared_torso": "vf_share_layers actor_critic_share_weights",
    "model.normalize_obs": "normalize_input observation_filter norm_obs clip_obs",
    "trajectory.rows": "n_steps num_steps rollout rollout_fragment_length rollout_length "
    "unroll_length horizon bptt_horizon",
    "actor.num_envs": "n_envs num_envs_per_worker num_envs_per_env_runner",
    "train.num_actors": "num_env_runners num_rollout_workers",
    "learner.device": "device cuda gpu num_gpus num_gpus_per_learner",
    "learner.batch_columns": "train_batch_size train_batch_size_per_learner",
    "learner.num_passes": "epochs n_epochs num_epochs update_epochs num_sgd_iter",
    "learner.stop_kl": "target_kl",
    "learner.max_lag": "max_policy_lag",
    "stop.env_steps": "total_timesteps total_steps train_for_env_steps timesteps timesteps_total "
    "num_env_steps_sampled_lifetime steps max_steps",
    "stop.updates": "training_iteration num_updates",
    "stop.wall_s": "train_for_seconds time_total_s",
    "stop.mean_return": "episode_reward_mean episode_return_mean reward_threshold",
    "checkpoint.every_s": "save_every_sec",
}
"""Keys of ours, each with the names of others that it is asked for by."""
UNITS = {
    "algorithm.value_cost": "the weight of half the squared error",
    "algorithm.num_minibatches": "parts of a batch, not their rows",
    "learner.batch_columns": "trajectories of trajectory.rows rows",
}
"""Keys of ours that count something else than the names of others do, and what they count."""

_OURS = {name: key for key, names in SYNONYMS.items() for name in names.split()}


def is_section(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def fields_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        yield key, field
        if is_section(field.annotation):
            yield from fields_of(field.annotation, f"{key}.")


FIELDS = dict(fields_of(RunConfig))
"""All keys and sections, by their dotted names."""
_SECTIONS = [key for key, field in FIELDS.items() if is_section(field.annotation)]


def explain(detail: dict[str, Any], sources: Mapping[str, str]) -> list[str]:
    """Tell one of pydantic's: source, dotted key, what is wanted, what it got."""
    loc, given = detail["loc"], detail["input"]
    key = ".".join(part for part in loc if isinstance(part, str))
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)[1:]
    start = f"{source_of(key, sources)}: {place}{': ' * bool(place)}"
    words = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error" and words:
        return [start + line for line in words.splitlines()]
    if detail["type"] == "extra_forbidden":
        within = next(iter(given), "") if isinstance(given, dict) else ""
        meant = key_like(key) or key_like(f"{key}.{within}")
        unit = f" ({UNITS[meant]})" if meant in UNITS else ""
        return [f"{start}unknown key" + (f"; did you mean {meant}{unit}?" if meant else "")]
    if detail["type"] == "missing":
        if key not in ("env", "env.id"):
            return [f"{start}required"]
        example = '--set env.id=CartPole-v1, or id = "CartPole-v1" in section [env]'
        return [f"{source_of(key, sources)}: env.id: required (for example {example})"]
    # Entries of tables that users fill are no fields of ours.
    what = words.replace("Input should be a valid", "wants a")
    if (field := FIELDS.get(key)) is not None:
        what = f"wants {wanted(field, is_item=isinstance(loc[-1], int))}"
        if isinstance(given, int) and given.bit_length() > 63 and " to " not in what:
            what += ", of 63 bits"
    got = shown(given)
    is_meant = key in NAMED_BY and isinstance(given, str | int)
    hint = f"; did you mean {key}.{NAMED_BY[key]}={got}?" if is_meant else ""
    if isinstance(given, str) and " number" in what:
        with contextlib.suppress(ValueError):
            float(given)
            hint = "; a number has no quotes"
    return [f"{start}{what}, got {got}{hint}"]


def source_of(key: str, sources: Mapping[str, str]) -> str:
    """Where a key and all that lies in it was set, or else what it lies in."""
    within = {
        source for each, source in sources.items() if not key or f"{each}.".startswith(f"{key}.")
    }
    while key and not within:
        key = key.rpartition(".")[0]
        within = {sources[key]} if key in sources else set()
    return " and ".join(sorted(within)) or "config"


def wanted(field: FieldInfo, *, is_item: bool = False) -> str:
    """Say what a key of ours takes, or an item of it, in a user's words."""
    args = typing.get_args(field.annotation)
    # The words that a key takes beside another kind.
    words = [w for arg in args[1:] if _is_word(arg) for w in typing.get_args(arg) or ("none",)]
    kind = args[0] if words else field.annotation
    bounds = field.metadata
    if typing.get_origin(kind) is typing.Annotated:
        kind, of_kind = typing.get_args(kind)
        bounds = of_kind.metadata
    if is_item:
        return _kind(typing.get_args(kind)[0])
    return ", or ".join([_kind(kind) + _range(bounds), *words])


def _is_word(kind: Any) -> bool:
    return kind is NoneType or typing.get_origin(kind) is typing.Literal


def _kind(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return f"{', '.join(args[:-1])} or {args[-1]}"
    if origin is tuple:
        example = {int: "64, 64", str: '"main", "past"'}.get(args[0], '"package.module:Name"')
        return f"a list like [{example}]"
    if origin is dict:
        return "a table like {size = 5}"
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(kind, "keys of its own, not a value")


def _range(bounds: list[Any]) -> str:
    if any(hasattr(bound, "min_length") for bound in bounds):
        return " that is not empty"
    ends = {
        word: getattr(bound, name)
        for bound in bounds
        for name, word in (("ge", "from"), ("gt", "over"), ("le", "to"), ("lt", "below"))
        if abs(getattr(bound, name, math.inf)) < 1e30
    }
    text = "".join(f" {word} {bound}" for word, bound in ends.items())
    return f"{text} up" if ends.keys() == {"from"} else text


def shown(value: Any) -> str:
    if value is None:
        return "none"
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        return "one that is too long or too deep to be shown"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def key_like(key: str) -> str | None:
    """The key that was meant: one of that name elsewhere, others' word for it, or one like it."""
    typed, key = key, key.lower().replace("-", "_")
    section, _, name = key.rpartition(".")
    if key in FIELDS and key != typed:
        return key
    same = [each for each in FIELDS if each.rpartition(".")[2] == name]
    # As `env.name` is others' `env_name`, which says more than a name alone.
    ours = _OURS.get(f"{section}_{name}") or ("" if section and same else _OURS.get(name))
    if ours:
        return ours
    near = difflib.get_close_matches(key, same, n=1, cutoff=0.0)
    if section in ("", *_SECTIONS):
        within = [each for each in FIELDS if each.rpartition(".")[0] == section]
        near = near or _named_like(name, within, 0.6 if section else 0.75)
        near = near or _named_like(name, list(FIELDS), 0.75)
    return near[0] if near else None


def _named_like(name: str, keys: list[str], cutoff: float) -> list[str]:
    """The key most like it, if any, by its name alone: with its section others would look alike."""
    names = [key.rpartition(".")[2] for key in keys]
    near = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return [keys[names.index(found)] for found in near]
