"""The cases of tests that start processes: `make test` has the first of each, `make test-all` all.

So `make test` has one seed, one story of a resumed run, and four pairs of runs that are equal to
the last bit: in lockstep, of a team in lockstep, replayed, and with frames sent in another way.
"""

import signal

import pytest


def first_of(first, *others):
    return [first, *(pytest.param(other, marks=pytest.mark.slow) for other in others)]


SEEDS = first_of(*range(5))
LOCKSTEPS = [*first_of("lag 1", "lag 0"), "a team"]
PROBES = first_of("learner", "actor")
SPACES = first_of("Mixed", "Masked")
AUTORESETS = first_of("NextStep", "SameStep")
ARE_SQUASHED = first_of("true", "false")
ENDS_OF_ACTORS = first_of(signal.SIGKILL, signal.SIGTERM)
# The tests of benchmarks take these.
LOOPS = first_of("bare", "step")
SIDES = ["raw", *first_of("ipc", "tcp", "narrow", "crowd")]
REQUESTS = first_of(signal.SIGTERM, signal.SIGINT)
