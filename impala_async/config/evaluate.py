"""The `[evaluate]` section, and what else evaluations have in common."""

SEED = 10_000
"""The seed of the environments where none is named: training begins with other ones."""
MAX_STEPS = 100_000
"""An environment that takes more steps is given up."""
