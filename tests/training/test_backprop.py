"""Compiled or as it is written, an update is the same; what does not compile goes on without."""

import logging

import pytest
import torch

from impala_async.training.backprop import Backprop


def use(step, backend):
    """The step, compiled by this backend."""
    old = step._backprop
    step._backprop = Backprop(
        step.policy, step.target, old._algorithm, step.optimizer.zero_grad, backend
    )
    return step


def no_compiler(graph, inputs):
    raise RuntimeError("no C++ compiler found\nsecond line")


@pytest.mark.parametrize("name", ["impala", "appo", "ppo", "a2c"])
def test_what_is_compiled_computes_what_is_written(make_step, make_batch, name):
    settings = {"name": name, "lr": 1e-2, "entropy_cost": 0.1, "entropy_cost_end": 0.0}
    plain, compiled = (make_step(schedule_env_steps=100, **settings) for _ in range(2))
    num_graphs = 0

    def backend(graph, inputs):
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    use(compiled, backend)
    for seed in range(4):
        batch, alive_B = make_batch(seed=seed), torch.arange(5) != seed
        want = plain.run(batch, alive_B, 10 * seed)
        got = compiled.run(batch, alive_B, 10 * seed)
        assert got.applied
        assert got.floats() == pytest.approx(want.floats(), rel=1e-4, abs=1e-6)
    for one, other in zip(plain.policy.tensors, compiled.policy.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    # A schedule compiles nothing anew, and neither does a column that is dead.
    assert num_graphs == 1


def test_what_does_not_compile_says_so_once_and_goes_on(make_step, make_batch, all_alive, caplog):
    plain, failing = make_step(), use(make_step(), no_compiler)
    with caplog.at_level(logging.WARNING):
        results = [
            step.run(make_batch(), all_alive, 0) for step in (failing, failing, plain, plain)
        ]
    (record,) = [each for each in caplog.records if "learner.compile" in each.getMessage()]
    assert "no C++ compiler found" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert results[0].floats() == results[2].floats()
    assert results[1].floats() == results[3].floats()


def test_a_fault_of_the_loss_itself_is_no_fault_of_the_compiler(make_step, make_batch, all_alive):
    step = use(make_step(), "eager")
    step._backprop._policy = None
    with pytest.raises(AttributeError):
        step.run(make_batch(), all_alive, 0)
