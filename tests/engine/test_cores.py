import os
import sys
from pathlib import Path

import pytest

from omni_ws.engine import threads
from omni_ws.engine.llm.gguf_engine import threads_of
from omni_ws.engine.threads import available_memory, cores, free_cores


class Machine:
    """The files in which Linux tells a process its control groups, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.memberships = folder / "cgroup"
        self.groups = folder / "groups"

    def write(self, memberships: str, files: dict[str, str]) -> None:
        self.memberships.write_text(memberships)
        for name, content in files.items():
            file = self.groups / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One of eight cores."""
    machine = Machine(tmp_path)
    monkeypatch.setattr(threads, "_MEMBERSHIPS", machine.memberships)
    monkeypatch.setattr(threads, "_CGROUPS", machine.groups)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return machine


def version_1(quota: str, period: str = "100000\n") -> dict[str, str]:
    return {"cpu/a/cpu.cfs_quota_us": quota, "cpu/a/cpu.cfs_period_us": period}


@pytest.mark.parametrize(
    ("memberships", "files", "expected"),
    [
        ("0::/\n", {}, 8),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}, 8),
        ("0::/a\n", {"a/cpu.max": "400000 100000\n"}, 4),
        ("0::/a\n", {"a/cpu.max": "399999 100000\n"}, 3),
        ("0::/a\n", {"a/cpu.max": "50000 100000\n"}, 1),
        ("0::/a\n", {"a/cpu.max": "1600000 100000\n"}, 8),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2),
        ("0::/a/b\n", {"a/cpu.max": "800000 100000\n", "a/b/cpu.max": "300000 100000\n"}, 3),
        # In a container the group is the root, whatever its path is outside.
        ("0::/outside/group\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/a\n", {"a/cpu.max": "nonsense\n"}, 8),
        ("0::/a\n", {"a/cpu.max": "100000 0\n"}, 8),
        ("3:cpu,cpuacct:/a\n", version_1("200000\n"), 2),
        ("3:cpu,cpuacct:/a\n", version_1("-1\n"), 8),
        ("3:cpuset:/a\n", version_1("200000\n"), 8),
        ("4:memory:/a\n3:cpu:/a\n0::/a\n", {**version_1("500000\n"), "a/cpu.max": "600000 100000\n"}, 5),
    ],
)
def test_cores_of_a_group_are_those_whose_time_it_may_use(
    machine: Machine, memberships: str, files: dict[str, str], expected: int
) -> None:
    machine.write(memberships, files)
    assert cores() == expected


def test_a_system_without_control_groups_leaves_all_cores(machine: Machine) -> None:
    assert cores() == 8


def test_fewer_cores_than_the_quota_are_what_there_is(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.write("0::/\n", {"cpu.max": "400000 100000\n"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5, 6}, raising=False)
    assert cores() == 3


@pytest.mark.parametrize(("machine_has", "expected"), [(6, 6), (None, 1)])
def test_a_system_that_binds_no_process_to_cores_has_those_of_the_machine(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, machine_has: int | None, expected: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: machine_has)
    assert cores() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="only there a process can be bound to some cores")
def test_here_they_are_at_most_those_that_this_process_is_bound_to() -> None:
    allowed = os.sched_getaffinity(0)
    assert 1 <= cores() <= len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    ("load", "free"), [((9.0, 0.0, 9.0), 8), ((0.0, 0.4, 0.0), 8), ((0, 1.0, 0), 7), ((0, 4.2, 0), 4), ((0, 9.0, 0), 1)]
)
def test_cores_are_free_that_were_not_busy_for_five_minutes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, load: tuple[float, float, float], free: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: load)
    assert free_cores() == free


def test_a_system_that_tells_no_load_has_all_cores_free(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", none)
    assert free_cores() == 8


@pytest.mark.parametrize(("free", "threads"), [(1, 1), (2, 2), (3, 2), (4, 3), (8, 7)])
def test_a_model_leaves_one_of_three_free_cores(free: int, threads: int) -> None:
    assert threads_of(free) == threads


@pytest.mark.parametrize(
    ("used", "cached", "free"), [(300_000, 0, 700_000), (900_000, 250_000, 350_000), (1_000_000, 0, 0)]
)
def test_memory_that_the_limit_of_a_container_leaves(machine: Machine, used: int, cached: int, free: int) -> None:
    group = {
        "a/memory.max": "1000000\n",
        "a/memory.current": f"{used}\n",
        "a/memory.stat": f"anon 5\ninactive_file {cached}\n",
    }
    machine.write("0::/a/b\n", group)
    assert available_memory() == free


def test_memory_without_a_limit(machine: Machine) -> None:
    machine.write("0::/a\n", {"a/memory.max": "max\n", "a/memory.current": "5\n", "a/memory.stat": ""})
    free = available_memory()
    assert free is None or free > 1_000_000
