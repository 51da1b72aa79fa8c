"""Stands for the processes that the train door starts."""

from impala_async.config.load import load_config
from impala_async.config.packaged import packaged_configs
from impala_async.runs.folder import RunFolder


class FakeRun:
    """It notes what it is given, and does what a run would."""

    made: list["FakeRun"]
    code = 0
    verdict = None
    has_begun = False

    def __init__(self, learner_flags, run_dir):
        self.flags = list(learner_flags)
        self.run_dir = run_dir
        self.num_actors, self.heard = 0, []
        FakeRun.made.append(self)

    def run(self, num_actors):
        self.num_actors = num_actors
        self.during(RunFolder(self.run_dir))
        return self.code

    @staticmethod
    def during(folder): ...

    def values(self, flag):
        return [v for f, v in zip(self.flags, self.flags[1:], strict=False) if f == flag]

    @property
    def settings(self):
        return dict(value.split("=", 1) for value in self.values("--set"))


def write_down(folder, *overrides, config="cartpole"):
    folder.begin(load_config(packaged_configs()[config], overrides))
    folder.let_go()
