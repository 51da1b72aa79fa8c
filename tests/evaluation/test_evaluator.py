"""The process that evaluates: real ones, which are told and answer as by a learner."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest
from safetensors.torch import save

from impala_async.config.env import EnvSection
from impala_async.config.model import ModelSection
from impala_async.config.run import RunConfig
from impala_async.evaluation.evaluator import NICENESS
from impala_async.evaluation.play import build_players
from impala_async.runs.folder import RunFolder
from tests.e2e.harness import wait_until

REWARD = "bench.probes:ActionReward"
COMMAND = (sys.executable, "-m", "impala_async.evaluation.evaluator")


def config_for(env_id, **evaluate):
    return RunConfig(
        env=EnvSection(id=env_id),
        model=ModelSection(hidden_sizes=(4,)),
        evaluate={"every_s": 1, **evaluate},
    )


def weights_for(config, bias):
    """Weights that prefer action 1 by twice the bias."""
    envs, policy = build_players(config, 1)
    envs.close()
    policy.model.policy_head.weight.data.zero_()
    policy.model.policy_head.bias.data[:] = policy.model.policy_head.bias.new_tensor([-bias, bias])
    return {name: tensor.clone() for name, tensor in policy.named_tensors().items()}


class Evaluating:
    def __init__(self, path, config):
        RunFolder(path).begin(config)
        self._fds = [os.memfd_create(name) for name in ("weights", "answers")]
        self.process = subprocess.Popen(
            [*COMMAND, str(path), *map(str, self._fds)],
            pass_fds=self._fds,
            **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
        )

    def hand_over(self, tensors):
        data = save(tensors)
        os.pwrite(self._fds[0], data, 0)
        self.process.stdin.write(b"%d\n" % len(data))
        self.process.stdin.flush()

    def answers(self, number):
        def look():
            lines = os.pread(self._fds[1], 1 << 16, 0).decode().splitlines()
            return lines if len(lines) == number else None

        return [json.loads(line) for line in wait_until("an answer", look)] if number else look()

    def close(self):
        with self.process:
            self.process.kill()
        for fd in self._fds:
            os.close(fd)


@contextmanager
def evaluating(path, config):
    opened = Evaluating(path, config)
    try:
        yield opened
    finally:
        opened.close()


def test_each_weights_are_answered_with_the_return_of_each_kind(tmp_path):
    config = config_for(REWARD, actions="both", episodes=40)
    with evaluating(tmp_path, config) as one:
        for number, (bias, greedy) in enumerate([(9.0, 1.0), (-9.0, 0.0), (0.1, 1.0)], start=1):
            one.hand_over(weights_for(config, bias))
            answer = one.answers(number)[-1]
            assert answer["greedy"] == greedy
            assert answer["took_s"] > 0
        assert 0.2 < answer["sampled"] < 0.9
        assert psutil.Process(one.process.pid).nice() == min(19, os.nice(0) + NICENESS)
        one.process.stdin.close()
        assert one.process.wait(20) == 0


def test_it_ends_in_good_order_when_it_is_asked_to(tmp_path):
    config = config_for("tests.evaluation.test_evaluator:closing")
    with evaluating(tmp_path, config) as one:
        one.hand_over(weights_for(config, 1.0))
        one.answers(1)
        one.process.terminate()
        assert one.process.wait(20) == 0
        assert one.process.stderr.read() == b"closed\n" * 5


def closing():
    from bench.probes import ActionReward

    class Closing(ActionReward):
        def reset(self, **how):
            assert sys.stdin.read() == ""
            return super().reset(**how)

        def close(self):
            os.write(2, b"closed\n")

    return Closing()


@pytest.mark.parametrize(
    ("env_id", "code", "says"),
    [("NoSuch-v1", 2, "NoSuch"), ("tests.evaluation.test_evaluator:failing", 2, "the sun is out")],
)
def test_its_last_word_says_why_it_cannot_go_on(env_id, code, says, tmp_path):
    config = config_for(env_id)
    with evaluating(tmp_path, config) as one:
        one.hand_over(weights_for(config_for(REWARD), 1.0))
        assert one.process.wait(20) == code
        *_, last = one.process.stderr.read().decode().splitlines()
        assert last.startswith("error: ")
        assert says in last
        assert one.answers(0) == []


def failing():
    from bench.probes import ActionReward

    class Failing(ActionReward):
        def step(self, action):
            raise RuntimeError("the sun is out")

    return Failing()
