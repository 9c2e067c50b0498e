"""What a build on a device costs: launches, copies, and what the host does for ids not its own (`make sim`)."""

import resource

import pytest

import kvcompile
from kvcompile import Plan, Request, device
from kvcompile.device import job
from kvcompile.device.ids import Lists, stand_in
from kvcompile.kernels import item
from kvcompile.request import gather
from tests.simulated import SimulatedMemory, cache

# int64 wraps around, as it should
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

HIGH = 0xFF00000000000000
FAR = 2**63 - 4096


def test_launches() -> None:
    """As few as the batch needs, and no copy beside them once the plan is on the device."""

    def launches(plan: Plan, count: int) -> list[str]:
        memory = SimulatedMemory()
        device.build(plan, [Request("a", [range(count)], [range(count)])], memory)
        assert memory.uploads <= 1
        return memory.launches

    apart = kvcompile.compile(cache(HIGH, tp_size=2), cache(FAR))
    assert launches(apart, 3) == ["settle", "spread"]
    assert launches(apart, 100) == ["settle"] * 5 + ["spread"]
    assert launches(kvcompile.compile(cache(HIGH), cache(FAR)), 3) == ["settle", "count", "scan", "write", "close"]
    nulls = kvcompile.compile(cache(HIGH, tp_size=2), cache(FAR, null=7))
    assert launches(nulls, 3) == ["settle", "mark", "scan", "count", "scan", "write", "close"]


def test_ids_on_the_device_cost_the_host_nothing() -> None:
    """Only their number is known here, and their place in no page of memory. Those given on the host are kept."""

    class Many:
        __cuda_array_interface__ = {"shape": (2**27,), "typestr": "<i4", "data": (64, False), "version": 3}  # noqa: RUF012

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    changed, arrays = stand_in([Request("a", [Many()], [[1, 2]]), Request("b", [[3]], [Many()])])
    given, *_ = gather(changed[:1], (4,), (4,))
    batch = given.batch
    assert (batch.src_at.tolist(), given.status[0, item.CODE]) == ([0, 2**27], item.OK)
    assert len(arrays) == 2
    lists = Lists(batch, {(0, 0, 0): arrays[0, 0, 0]}, 1, 1)
    assert lists.host_ids.tolist() == [1, 2]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18, "kibibytes"
    lists.put(640)
    assert lists.table.tolist() == [[64, 4, 4, 0, 0, 0], [640, 8, 8, 1, 0, 0]]


def test_a_plan_is_uploaded_once() -> None:
    plan, memory = kvcompile.compile(cache(HIGH, tp_size=2), cache(FAR)), SimulatedMemory()
    for _ in range(3):
        device.build(plan, [Request("a", [[1]], [[2]])], memory)
    assert memory.uploads == 1
    device.build(plan.with_table(plan.table[:1]), [Request("a", [[1]], [[2]])], memory)
    assert memory.uploads == 2
    assert len(job._uploaded[plan]) == 1
