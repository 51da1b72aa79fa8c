"""Every section refuses unknown keys, changes, broken rules, and truth for numbers."""

import math
from typing import Literal

import pytest
from pydantic import ValidationError

from impala_async.config.section import Section, unknown_name
from impala_async.errors import ConfigError
from tests.config.made import config_of, mistakes


class Sample(Section):
    count: int = 1
    rate: float | None = 0.5
    is_on: bool = False
    sizes: tuple[int, ...] = (1, 2)
    is_shown: bool | Literal["auto"] = "auto"

    def broken_rules(self):
        if self.count > 5:
            yield "count is too large"
        if self.rate == 0.1:
            yield "rate is too low"


def test_what_is_refused():
    for settings in (
        *({"cuont": 1}, {"rate": math.nan}, {"rate": math.inf}, {"count": True}, {"rate": False}),
        *({"is_on": 1}, {"is_on": "yes"}, {"is_on": None}, {"sizes": [True]}, {"count": [True]}),
        *({"count": "1"}, {"rate": "0.5"}, {"is_shown": "yes"}, {"is_shown": 1}),
    ):
        with pytest.raises(ValidationError):
            Sample(**settings)
    with pytest.raises(ValidationError, match="count is too large\nrate is too low"):
        Sample(count=6, rate=0.1)


def test_what_is_fine_stays_as_it_is():
    for none in (None, "none"):  # TOML has text only
        sample = Sample(count=3, rate=none, is_on=True, sizes=(4,))
        assert (sample.count, sample.rate, sample.is_on, sample.sizes) == (3, None, True, (4,))
    for word in (True, False, "auto"):
        assert Sample(is_shown=word).is_shown is word
    with pytest.raises(ValidationError):
        sample.count = 4


def test_a_name_is_known_or_of_a_module():
    for name in ("mlp", "a.b:C", "a:C"):
        assert list(unknown_name("name", name, ["mlp"])) == []
    for name in ("cnn", "", "a:", ":C", "a.b", "a b:C", "a:b:C", "a/b:C"):
        told = f"name must be one of mlp, or package.module:Name of your own, got {name!r}"
        assert list(unknown_name("name", name, ["mlp"])) == [told]


DEEP, LONG = "[" * 300 + "]" * 300, "9" * 5000


def test_arguments_are_what_can_be_written_down_and_read_again(tmp_path):
    path, says = tmp_path / "my.toml", "wants text in UTF-8, numbers (whole ones of 64 b"
    for setting, key in (
        (f"env.kwargs.x = {DEEP}", "env.kwargs.x"),
        (f"env.kwargs{'.a' * 1500} = 1", "env.kwargs.a"),
        (f"env.kwargs.x = 0x{LONG}", "env.kwargs.x"),
        (f"env.kwargs.x = {2**63}", "env.kwargs.x"),
        ("env.kwargs.at = 07:32:00", "env.kwargs.at"),
        ("env.kwargs.at = [2024-01-02]", "env.kwargs.at"),
        ("env.wrappers = [{name='a:b', kwargs={when=2024-01-02}}]", "env.wrappers[0].kwargs.when"),
    ):
        for content, overrides, source in (
            (f'env.id = "X"\n{setting}\n', [], path),
            ('env.id = "X"\nenv.kwargs.y = 1\n', [setting], "--set"),
        ):
            path.write_text(content)
            (line,) = mistakes(path, *overrides)
            assert line.startswith(f"{source}: {key}: {says}")
            assert len(line) < 300
    for odd in ({"x": "\udcff"}, {"\udcff": 1}, {"x": {"\udcff": 1}}, {"x": object()}):
        with pytest.raises(ConfigError, match=r"env\.kwargs.*: wants text in UTF-8"):
            config_of(env={"id": "X", "kwargs": odd})
    fine = {"a": [1, 2**63 - 1, 0.5, "ü", None, True], "b": {"c": [[]]}}
    assert config_of(env={"id": "X", "kwargs": fine}).env.kwargs == fine
