"""A copy on its way to the host. What a device has to do with it is shown in `tests/gpu`."""

import torch

from impala_async.training.host_copy import HostCopy


def test_on_a_cpu_it_is_the_tensor_itself_and_there_is_nothing_to_wait_for():
    tensor = torch.arange(3.0)
    assert HostCopy(tensor).wait() is tensor
