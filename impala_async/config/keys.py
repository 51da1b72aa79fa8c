"""All keys there are, and which of them is meant by one that there is not.

Stable-Baselines3, CleanRL, PufferLib, Sample Factory and RLlib have names of their own for our
settings. None of them is accepted: a mistake is answered with them. A name of theirs that only one
key of ours has too, like `gamma`, needs no entry.
"""

import difflib
from collections.abc import Iterator
from typing import Any, TypeGuard

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from impala_async.config.run import RunConfig

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
