"""Marks tests of what an older torch lacks, or computes otherwise."""

import pytest
import torch

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


def wants_torch(major, minor):
    is_older = (major, minor) > RELEASE
    return pytest.mark.skipif(is_older, reason=f"wants torch {major}.{minor} or newer")
