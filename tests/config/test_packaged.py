"""The packaged configs are those of the checkout."""

from pathlib import Path

from impala_async.config.packaged import packaged_configs


def test_each_is_found_by_its_name():
    found = packaged_configs()
    assert {path.name for path in found.values()} == {
        path.name for path in Path("configs").glob("*.toml")
    }
    assert found["cartpole"].name == "cartpole.toml"
