import pytest


@pytest.fixture
def toml(tmp_path):
    """A file with a few settings."""
    path = tmp_path / "run.toml"
    path.write_text(
        "seed = 3\n[env]\nid = 'FromFile'\nkwargs = {size = 5}\n[learner]\nnum_passes = 2\n"
    )
    return path
