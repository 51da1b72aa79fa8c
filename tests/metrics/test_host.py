"""How much of its host a process may have, in a container too: files as the kernel writes them."""

import os
from types import SimpleNamespace

import pytest

from impala_async.metrics import host
from impala_async.metrics.host import Memory, count_cores, find_memory

MIB = 1 << 20
GROUPS = [".", "outer", "outer/inner"]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Eight cores and 64 MiB, of which 40 are free. No control group says anything."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    found = SimpleNamespace(total=64 * MIB, available=40 * MIB)
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: found)
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    monkeypatch.setattr(host, "OWN_CGROUPS", tmp_path / "own")
    return tmp_path


@pytest.fixture(params=["one tree", "a tree of each"])
def tree(request, machine):
    """Where the groups of a controller are, by either version of control groups."""
    if request.param == "one tree":
        (machine / "own").write_text("0::/outer/inner\n")
        return lambda controller: machine
    lines = "9:name=systemd:/", "4:memory:/outer/inner", "1:cpu,cpuacct:/outer/inner", "0::/"
    (machine / "own").write_text("\n".join(lines))
    return lambda controller: machine / controller


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max", 8), ("-1", 8), ("250000", 2), ("50000", 1), ("9900000", 8), ("", 8)],
)
def test_no_more_cores_than_the_quota_of_any_group_around_it(tree, machine, group, quota, expected):
    assert count_cores() == 8
    if tree("cpu") == machine:
        write(machine / group, cpu__max=f"{quota} 100000")
    else:
        write(machine / "cpu" / group, cpu__cfs_quota_us=quota, cpu__cfs_period_us=100000)
    assert count_cores() == expected
    # Without a word about its groups it sees its own as the root.
    (machine / "own").unlink()
    assert count_cores() == (expected if group == "." and tree("cpu") == machine else 8)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        ("max", 5 * MIB, (64, 40)),
        (1 << 63, 5 * MIB, (64, 40)),
        (32 * MIB, 20 * MIB, (32, 15)),
        # The host has less than is left of the limit.
        (60 * MIB, 5 * MIB, (60, 40)),
        # So it is where a limit was lowered.
        (8 * MIB, 20 * MIB, (8, 0)),
        (32 * MIB, "", (64, 40)),
    ],
)
def test_no_more_memory_than_the_limit_of_any_group(tree, machine, group, limit, used, expected):
    stat = "anon 1\n{0}active_file 1048576\n{0}inactive_file 2097152\n{0}unevictable 99"
    if tree("memory") == machine:
        files = {"memory__max": limit, "memory__current": used, "memory__stat": stat.format("")}
    else:
        files = {"memory__limit_in_bytes": limit, "memory__usage_in_bytes": used}
        # Without "total" it is that of the group alone, and not of those within it.
        own = "active_file 7\ninactive_file 7\n"
        files["memory__stat"] = own + stat.format("total_")
    write(tree("memory") / group, **files)
    assert find_memory() == Memory(*(number * MIB for number in expected))


def test_without_control_groups_it_has_the_host(machine):
    assert (count_cores(), find_memory()) == (8, Memory(64 * MIB, 40 * MIB))


def test_this_host_has_some():
    found = find_memory()
    assert 0 < found.free < found.total
    assert 1 <= count_cores() <= os.cpu_count()
