"""Samplers: policy and environments in a loop that writes trajectories."""
