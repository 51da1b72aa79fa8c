"""Self-play: tic-tac-toe, learned against a frozen copy of oneself.

    python examples/tictactoe.py [flags of train]

Two agents, two policies: `main` learns, `past` is what it was some updates ago. In each game they
are dealt to the two sides anew, so both learn to begin and to answer. docs/policies.md has more.

The environment is a parallel one, as PettingZoo has them: both agents act in every step. The one
who is not to move has one legal action, which is to wait.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from numpy.typing import NDArray

NUM_PLACES = 9
WAIT = NUM_PLACES
LINES = (
    *((0, 1, 2), (3, 4, 5), (6, 7, 8)),
    *((0, 3, 6), (1, 4, 7), (2, 5, 8)),
    *((0, 4, 8), (2, 4, 6)),
)


class TicTacToe:
    """A win gives 1, a loss -1, a draw 0. Each side sees the board as its own.

    An action that is not legal loses the game, and is counted.
    """

    metadata = {"name": "tictactoe"}  # noqa: RUF012

    def __init__(self) -> None:
        self.possible_agents = ["first", "second"]
        self.agents: list[str] = []
        self.num_illegal = 0
        seen = {"board": Box(0, 1, (2, NUM_PLACES), np.float32), "is_to_move": Discrete(2)}
        self._obs_space = Dict(seen, action_mask=Box(0, 1, (NUM_PLACES + 1,), np.int8))
        self._action_space = Discrete(NUM_PLACES + 1)

    def observation_space(self, agent: str) -> Dict:
        return self._obs_space

    def action_space(self, agent: str) -> Discrete[Any]:
        return self._action_space

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        self.agents = list(self.possible_agents)
        # A row of places for each side.
        self._taken: NDArray[np.bool_] = np.zeros((2, NUM_PLACES), np.bool_)
        self._mover = 0
        return self._show(), {}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        shown = self._legal()
        mover, agents = self._mover, self.agents
        score = 0.0
        chosen = [int(actions[agent]) for agent in agents]
        illegal = [side for side in (0, 1) if not shown[side][chosen[side]]]
        if illegal:
            self.num_illegal += len(illegal)
            score = -1.0 if illegal[0] == mover else 1.0
        else:
            mine = self._taken[mover]
            mine[chosen[mover]] = True
            score = float(any(mine[list(line)].all() for line in LINES))
        is_over = bool(score) or bool(self._taken.any(0).all())
        self._mover = 1 - mover
        rewards = {agents[mover]: score, agents[1 - mover]: -score}
        ends = dict.fromkeys(agents, is_over)
        obs = self._show()
        if is_over:
            self.agents = []
        return obs, rewards, ends, dict.fromkeys(agents, False), {agent: {} for agent in agents}

    def close(self) -> None:
        """There is nothing to close."""

    def _legal(self) -> NDArray[np.int8]:
        """The places that each side may take, and whether it may wait."""
        legal = np.zeros((2, NUM_PLACES + 1), np.int8)
        legal[self._mover, :NUM_PLACES] = ~self._taken.any(0)
        legal[1 - self._mover, WAIT] = 1
        return legal

    def _show(self) -> dict[str, Any]:
        legal = self._legal()
        return {
            agent: {
                "board": self._taken[[side, 1 - side]].astype(np.float32),
                "is_to_move": np.int64(side == self._mover),
                "action_mask": legal[side],
            }
            for side, agent in enumerate(self.possible_agents)
        }


CONFIG = Path(__file__).resolve().parents[1] / "configs" / "self_play.toml"


def main(flags: Sequence[str] = ()) -> int:
    """Do what `python -m impala_async.train --config configs/self_play.toml` does."""
    from impala_async.train import main as train

    here = str(CONFIG.parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    return train(["--config", str(CONFIG), *flags])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
