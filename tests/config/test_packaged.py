"""The packaged configs are those of the checkout."""

from pathlib import Path

import pytest

from impala_async.config.packaged import find_config, packaged_configs
from impala_async.errors import ConfigError


def test_each_is_found_by_its_name():
    found = packaged_configs()
    assert {path.name for path in found.values()} == {
        path.name for path in Path("configs").glob("*.toml")
    }
    assert found["cartpole"].name == "cartpole.toml"


def test_a_file_comes_before_a_name_and_a_name_is_guessed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("cartpole") == packaged_configs()["cartpole"]
    assert find_config("elsewhere.toml") == Path("elsewhere.toml")
    (tmp_path / "cartpol").touch()
    assert find_config(Path("cartpol")) == Path("cartpol")
    (tmp_path / "cartpole").mkdir()
    assert find_config("cartpole") == packaged_configs()["cartpole"]
    with pytest.raises(ConfigError, match=r"no file cartpole\.tml; did you mean cartpole\?"):
        find_config("cartpole.tml")
