"""Whole episodes with a trained policy: for `evaluate`, and beside a learner.

Both have these in common, and a door imports nothing large at first.
"""

SEED = 10_000
"""The seed of the environments where none is named: training begins with other ones."""
MAX_STEPS = 100_000
"""An environment that takes more steps for each of its episodes is given up."""
