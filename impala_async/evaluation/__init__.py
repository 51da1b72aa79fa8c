"""Whole episodes with a trained policy: for `evaluate`, and beside a learner."""
