"""Your own network between the observation and the heads: a torso, trained on CartPole-v1.

    python examples/custom_model.py [flags of train]

`model.name` is `package.module:Class`. Learner and actors each import it by that name, so it must
be where Python finds it: installed, in the folder that you start from, or on PYTHONPATH. All that
is around a torso stays ours: normalised observations before it, a recurrent core behind it if
`model.core` says so, and the heads of policy and value. docs/models.md has the rules.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from impala_async.config.model import ModelSection
from impala_async.models.leaves import as_vector, vector_size
from impala_async.schema import ObsSpec


class MyTorso(nn.Module):
    """Layers with layer normalisation, each with a way around it.

    It takes any observation: `as_vector` makes float32 of numbers and one-hot vectors of
    categories. Numbers that mean something to you can be told apart by `leaf.name`.
    """

    def __init__(self, obs: ObsSpec, section: ModelSection) -> None:
        super().__init__()
        sizes = section.hidden_sizes or (64, 64)
        if len(set(sizes)) > 1:
            raise ValueError(f"model.hidden_sizes: MyTorso wants equal ones, got {list(sizes)}")
        self.leaves = obs.leaves
        self.num_out = sizes[0]
        self.enter = nn.Linear(sum(vector_size(leaf) for leaf in obs.leaves), self.num_out)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(size), nn.Linear(size, size), nn.GELU()) for size in sizes
        )

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        """`[N, ...]` leaves in, `[N, num_out]` features out."""
        vectors = [as_vector(leaf, obs[leaf.name]) for leaf in self.leaves]
        features: Tensor = self.enter(torch.cat(vectors, -1))
        for layer in self.layers:
            features = features + layer(features)
        return features


SETTINGS = (
    "env.id=CartPole-v1",
    "model.name=examples.custom_model:MyTorso",
    "stop.mean_return=100",
    "stop.env_steps=400_000",
)


def main(flags: Sequence[str] = ()) -> int:
    """Do what `python -m impala_async.train --set env.id=... --set ...` does in a shell."""
    from impala_async.train import main as train

    here = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    return train([part for setting in SETTINGS for part in ("--set", setting)] + list(flags))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
