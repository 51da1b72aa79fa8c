"""Samplers: policy and environments in a loop that writes trajectories."""

from impala_async.actor.samplers.build import build_sampler, columns_per_message

__all__ = ["build_sampler", "columns_per_message"]
