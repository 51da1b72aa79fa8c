"""An intrinsic reward of your own: random network distillation (arXiv 1810.12894), on a way over a
frozen lake that nobody finds by chance.

    python examples/rnd.py [flags of train]

`algorithm.intrinsic_reward` is `package.module:Name`, and only the learner imports it. The error of
the predictor about an observation is the reward of coming there. docs/models.md has the rules.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from impala_async.models.leaves import as_vector, vector_size
from impala_async.schema import ActionSpec, ObsSpec


class RND(nn.Module):
    def __init__(self, obs: ObsSpec, action: ActionSpec) -> None:
        super().__init__()
        self.leaves, size = obs.leaves, sum(vector_size(leaf) for leaf in obs.leaves)
        nets = [[nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, 32)] for _ in range(2)]
        self.target, self.predictor = (nn.Sequential(*layers) for layers in nets)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight, 2**0.5)
        self.target.requires_grad_(False)

    def forward(self, obs: dict[str, Tensor], actions: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The reward and the loss of each row `[B, T]`, by the observation that follows it."""
        after = [as_vector(leaf, obs[leaf.name][:, 1:].flatten(0, 1)) for leaf in self.leaves]
        vectors = torch.cat(after, -1)
        errors = (self.predictor(vectors) - self.target(vectors)).square().mean(-1)
        errors_BT = errors.view(len(obs[self.leaves[0].name]), -1)
        return errors_BT.detach(), errors_BT


LAKE = ["SFFFFFF", "HHHHHHF", "FFFFFFF", "FHHHHHH", "FFFFFFF", "HHHHHHF", "GFFFFFF"]
SETTINGS = (
    *("env.id=FrozenLake-v1", f"env.kwargs.desc={LAKE}", "env.kwargs.is_slippery=false"),
    *("env.kwargs.max_episode_steps=100", "stop.mean_return=0.8", "stop.env_steps=300_000"),
    "algorithm.intrinsic_reward=examples.rnd:RND",
)


def main(flags: Sequence[str] = ()) -> int:
    from impala_async.train import main as train

    here = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    return train([part for setting in SETTINGS for part in ("--set", setting)] + list(flags))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
