"""The package itself is light, and has a few names that are loaded when they are asked for."""

import subprocess
import sys

import pytest

import impala_async
from impala_async.library import loaded_policy, run

LIGHT = """
import sys
import impala_async
assert set(impala_async.__all__) <= set(dir(impala_async))
heavy = {"torch", "numpy", "gymnasium", "pydantic", "zmq"} & sys.modules.keys()
assert not heavy, heavy
impala_async.Run, impala_async.run
assert not {"torch", "gymnasium"} & sys.modules.keys()
"""


def test_its_names_are_few_and_lead_to_what_they_say():
    assert impala_async.__all__ == ["LoadedPolicy", "Run", "__version__", "load_policy", "run"]
    assert impala_async.load_policy is loaded_policy.load_policy
    assert impala_async.LoadedPolicy is loaded_policy.LoadedPolicy
    assert impala_async.run is run.run
    assert impala_async.Run is run.Run
    with pytest.raises(AttributeError, match="'impala_async' has no attribute 'no_such'"):
        _ = impala_async.no_such


def test_to_import_it_loads_nothing_and_a_run_needs_no_torch():
    subprocess.run([sys.executable, "-c", LIGHT], check=True)
