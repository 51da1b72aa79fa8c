"""A graph gives what the loaded policy does, for any number of observations, over its state too."""

import importlib.util
import io

import numpy as np
import pytest
import torch

from impala_async import load_policy
from impala_async.errors import ConfigError
from impala_async.library.exported import as_onnx, as_torch, check_needs, trace
from impala_async.library.loaded_policy import open_policy
from tests.library.test_loaded_policy import CASES, begin
from tests.torches import wants_torch

CHOSEN = ["mlp", "cnn", "lstm", "masks", "dict", "squashed", "numbers"]
# The sum is 1,000.
SIZES = (1, 2, 297, 700)
HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))


def observations(policy, num):
    """Leaves that such a policy takes, and what `act` says to each of the same."""
    rng, schema = np.random.default_rng(num), policy.schema
    leaves = {}
    for leaf in schema.obs.leaves:
        shape = (num, *leaf.shape)
        if leaf.is_float:
            leaves[leaf.name] = rng.standard_normal(shape).astype(leaf.dtype)
        else:
            most = 2 if leaf.name == schema.action.legal else min(leaf.choices or (256,))
            leaves[leaf.name] = rng.integers(0, most, shape).astype(leaf.dtype)
    state = {s.name: rng.standard_normal((num, *s.shape)).astype(s.dtype) for s in schema.state}
    return leaves, state


def compare(opened, graph, call):
    names = [each.name for each in graph.outputs]
    for num in SIZES:
        leaves, state = observations(opened, num)
        given = call([*leaves.values(), *state.values()])
        assert len(given) == len(names)
        expected = opened.policy.act(leaves, state)
        for name, spec, array in zip(names, graph.outputs, given, strict=True):
            assert array.shape == (num, *spec.shape), name
            assert str(array.dtype) == spec.dtype, name
            kind, _, part = name.partition("/")
            if kind == "action":
                np.testing.assert_allclose(array, expected.actions[part], atol=1e-5)
            elif kind == "log_prob":
                np.testing.assert_allclose(array, expected.log_probs, atol=1e-5)
            elif kind == "next_state":
                # Rounding in a CNN of random weights, whose features are large.
                np.testing.assert_allclose(array, expected.state[part], atol=1e-4)


@wants_torch(2, 7)
@pytest.mark.filterwarnings("ignore")  # of an older torch
@pytest.mark.parametrize("case", CHOSEN)
def test_a_file_of_torch_gives_what_the_policy_does(tmp_path, case):
    folder, _ = begin(tmp_path, *CASES[case])
    opened = open_policy(folder.path)
    graph = trace(opened)
    module = torch.export.load(io.BytesIO(as_torch(graph))).module()

    def call(arrays):
        with torch.no_grad():
            return [each.numpy() for each in module(*map(torch.from_numpy, arrays))]

    compare(opened, graph, call)


@wants_torch(2, 7)
@pytest.mark.skipif(not HAS_ONNX, reason="wants onnx, onnxscript and onnxruntime")
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("case", CHOSEN)
def test_a_file_of_onnx_gives_what_the_policy_does(tmp_path, case):
    import onnxruntime

    folder, _ = begin(tmp_path, *CASES[case])
    opened = open_policy(folder.path)
    graph = trace(opened)
    session = onnxruntime.InferenceSession(as_onnx(graph))
    names = [each.name for each in graph.inputs]
    assert [each.name for each in session.get_inputs()] == names
    compare(opened, graph, lambda arrays: session.run(None, dict(zip(names, arrays, strict=True))))


@wants_torch(2, 7)
def test_parameters_are_the_logits_and_the_batch_is_as_it_acts(tmp_path):
    folder, _ = begin(tmp_path, *CASES["mlp"])
    graph = trace(open_policy(folder.path))
    obs = np.float32([[0.1, 0.2, -0.1, 0.0], [1, -1, 1, -1]])
    with torch.no_grad():
        logits, actions, log_probs = graph.program.module()(torch.from_numpy(obs))
    acted = load_policy(folder.path).act(obs)
    np.testing.assert_array_equal(actions.numpy(), acted.action)
    np.testing.assert_allclose(log_probs.numpy(), acted.log_prob, atol=1e-6)
    expected = logits.log_softmax(-1).max(-1).values
    np.testing.assert_allclose(expected.numpy(), acted.log_prob, atol=1e-6)


@wants_torch(2, 7)
@pytest.mark.parametrize(("log_std", "acts_by"), [(5.0, 2.0), (-31.0, -10.0), (0.5, 0.5)])
def test_the_deviations_are_those_by_which_it_acts(tmp_path, log_std, acts_by):
    folder, _ = begin(tmp_path, *CASES["squashed"])
    opened = open_policy(folder.path)
    with torch.no_grad():
        opened.policy.model.policy_head.log_stds[0].fill_(log_std)
        parameters, *_ = trace(opened).program.module()(torch.zeros(2, 3))
    np.testing.assert_allclose(parameters[:, 1], acts_by)


@wants_torch(2, 7)
def test_missing_packages_are_told_with_their_extra(monkeypatch):
    monkeypatch.setattr("impala_async.library.exported.find_spec", lambda name: None)
    check_needs(is_onnx=False)
    with pytest.raises(ConfigError) as caught:
        check_needs(is_onnx=True)
    wants = "--onnx: needs onnx and onnxscript: pip install 'impala-async[export]'"
    assert str(caught.value) == wants


def test_a_torch_that_is_too_old_is_told(monkeypatch):
    for version in ("2.7.0a0+6c54963f75.nv25.2", "2.10.0"):
        monkeypatch.setattr(torch, "__version__", version)
        check_needs(is_onnx=False)
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    with pytest.raises(ConfigError, match=r"needs torch 2\.7 or newer, and 2\.6\.0 is installed"):
        check_needs(is_onnx=False)
