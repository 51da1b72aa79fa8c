"""The `[model]` section: the network, and which of its keys go together."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from impala_async.config.section import Section, unknown_name

TORSOS = ("auto", "mlp", "nature_cnn", "impala_resnet", "small_cnn")


class ModelSection(Section):
    """The network."""

    name: str = "auto"
    """The torso: mlp, nature_cnn, impala_resnet, small_cnn, or your own as package.module:Name.
    auto: nature_cnn where all images are 36 x 36 or larger, small_cnn where one is smaller, mlp
    without any. An image of a side below 3 is a vector."""
    hidden_sizes: tuple[int, ...] | None = Field(None, min_length=1)
    """Hidden widths; none: 64, 64 (mlp), 512 (nature_cnn), 256 (impala_resnet), 128 (small_cnn)."""
    activation: Literal["tanh", "relu"] | None = None
    """Activation of the hidden layers; none: tanh (mlp), relu (images)."""
    width: int = Field(1, ge=1, le=64)
    """impala_resnet: times as many channels."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Torsos compute in it, at learner and actors; losses and what is learned are float32. auto,
    each for itself: bfloat16 for nature_cnn and impala_resnet, on a device that has it."""
    shared_torso: bool | None = None
    """One torso for policy and value, or one each; none: one each for a plain mlp."""
    core: Literal["lstm", "gru"] | None = None
    """A recurrent core between torso and heads; none: no memory."""
    core_size: int = Field(256, ge=1)
    """Units of the core."""
    normalize_obs: bool | Literal["auto"] = "auto"
    """Normalise vectors of numbers by their running mean and deviation. auto: where there are any;
    a torso of your own gets floats alone so."""
    # Within what a distribution lets it be.
    initial_std: float = Field(1.0, ge=1e-4, le=7)
    """Continuous actions: the deviation to begin with."""
    state_dependent_std: bool = False
    """Continuous actions: the deviation comes from the state, too."""

    @property
    def has_shared_torso(self) -> bool:
        is_usual = self.name != "mlp" or self.core is not None
        return is_usual if self.shared_torso is None else self.shared_torso

    def broken_rules(self) -> Iterator[str]:
        yield from unknown_name("name", self.name, TORSOS)
        if self.hidden_sizes is not None and min(self.hidden_sizes) < 1:
            yield f"hidden_sizes must all be at least 1, got {list(self.hidden_sizes)}"
        if self.core is not None and not self.has_shared_torso:
            yield (
                f"shared_torso (false) does not go with core ({self.core}), which policy and value "
                "share: drop one of them"
            )
