"""Node classes of Grid Engine."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.lrm.node_classes import NodeClassSettings
from koalapy.agent.lrm.port import LrmSubmission
from koalapy.agent.lrm.sge.adapter import LAYOUT_MAX_AGE_S
from koalapy.agent.lrm.sge.answers import read_hosts
from koalapy.model.errors import SiteRejected
from koalapy.model.node_requirement import MAX_CORES, MAX_GPUS, MAX_MEMORY, Gpus, NodeRequirement
from tests.virtual_time import VirtualClock, VirtualTimeLoop

from .conftest import FakeGridEngine, RememberingControl

GB = 10**9
HEAD = "<?xml version='1.0'?>\n<qhost xmlns:xsd=\"http://example.org/qhost.xsd\">\n <host name='global'>\n"
HEAD += "   <hostvalue name='mem_total'>-</hostvalue>\n </host>\n"


def make_qhost(**memory: str) -> str:
    hosts = "".join(
        f" <host name='{name.replace('_', '-')}.site.org'>\n   <hostvalue name='num_proc'>8</hostvalue>\n"
        f"   <hostvalue name='mem_total'>{size}</hostvalue>\n   <hostvalue name='mem_used'>1.0G</hostvalue>\n </host>\n"
        for name, size in memory.items()
    )
    return f"{HEAD}{hosts}</qhost>\n"


def make_submission(folder: Path, nodes: int, node_class: str = "") -> LrmSubmission:
    return LrmSubmission("koala-new", nodes, ["true"], {}, folder, folder / "out", node_class=node_class)


async def test_classes_follow_memory_and_configuration(
    engine: FakeGridEngine, control: RememberingControl, tmp_path: Path
) -> None:
    engine.set_answer("qhost", make_qhost(h2_1="31.2G", h2_2="31.2G", h2_3="503.5G", h2_4="-"))
    adapter = engine.make_lrm(control, node_classes={"fast": NodeClassSettings(hosts="h2-1", power=2.0)})
    classes = (await adapter.take_snapshot()).node_classes
    assert [(c.name, c.total, c.power) for c in classes] == [
        ("fast", 1, 2.0),
        ("other", 1, None),
        ("33.5GB", 1, None),
        ("541GB", 1, None),
    ]
    await adapter.submit_job(make_submission(tmp_path, 1, "fast"))
    await adapter.submit_job(make_submission(tmp_path, 2))
    with_class, without = control.native
    assert with_class[with_class.index("-l") + 1] == "h=h2-1"
    assert "-l" not in without
    with pytest.raises(SiteRejected, match="2 nodes of the class 541GB") as refused:
        await adapter.submit_job(make_submission(tmp_path, 2, "541GB"))
    assert refused.value.fault == "limit"


async def test_job_of_class_requests_alternative_hosts(
    engine: FakeGridEngine, control: RememberingControl, tmp_path: Path
) -> None:
    adapter = engine.make_lrm(control, node_classes={"fast": NodeClassSettings(hosts="h2-[1-3]")})
    await adapter.submit_job(make_submission(tmp_path, 2, "fast"))
    assert "h=h2-1|h2-2|h2-3" in control.native[0]


async def test_snapshot_without_qhost_has_no_properties(engine: FakeGridEngine, control: RememberingControl) -> None:
    engine.set_answer("qhost", "no such thing", code=1)
    (unknown,) = (await engine.make_lrm(control).take_snapshot()).node_classes
    assert (unknown.memory, unknown.cores, unknown.gpus, unknown.features) == (None, None, (), ())
    engine.set_answer("qhost", "<html>", code=0)
    assert (await engine.make_lrm(control).take_snapshot()).idle == 4


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("31.2G", int(31.2 * 2**30)),
        ("512.0M", 512 << 20),
        ("2k", 2000),
        ("7", 7),
        ("-", None),
        ("0.0", None),
        ("x", None),
    ],
)
def test_read_hosts_returns_memory(size: str, expected: int | None) -> None:
    assert read_hosts(make_qhost(h1=size).encode())["h1"].memory == expected


RESOURCES = """  <resourcevalue name='arch' dominance='hl'>lx-amd64</resourcevalue>
  <resourcevalue name='load_short' dominance='hl'>1.000000</resourcevalue>
  <resourcevalue name='gpu' dominance='hc'>{free}.000000</resourcevalue>
  <resourcevalue name='tape' dominance='hc'>1.000000</resourcevalue>
  <resourcevalue name='ib' dominance='hf'>1.000000</resourcevalue>
  <resourcevalue name='scratch_ssd' dominance='hf'>TRUE</resourcevalue>
  <resourcevalue name='old' dominance='hf'>0.000000</resourcevalue>
"""
"""What ``qhost -F -xml`` adds for a host with two GPUs, of which some are free."""


def add_resources(answer: str, host: str, free_gpus: int) -> str:
    """Add resources to a host in an answer of qhost."""
    begin = f" <host name='{host}.site.org'>\n"
    return answer.replace(begin, begin + RESOURCES.format(free=free_gpus))


async def test_classes_keep_gpus_while_jobs_use_them(
    engine: FakeGridEngine, control: RememberingControl, virtual_loop: VirtualTimeLoop
) -> None:
    whole = make_qhost(h2_1="31.2G", h2_2="31.2G", h2_3="31.2G", h2_4="31.2G")
    engine.set_answer("qhost", add_resources(whole, "h2-1", 2))
    adapter = engine.make_lrm(control, clock=VirtualClock(virtual_loop))
    for free in (2, 0):
        engine.set_answer("qhost", add_resources(whole, "h2-1", free))
        classes = {c.name: c for c in (await adapter.take_snapshot()).node_classes}
        assert classes["ib+scratch_ssd-2xgpu-33.5GB"].gpus == (Gpus(2),)
        assert [c.total for c in classes.values()] == [3, 1]
        assert {c.cores for c in classes.values()} == {8}
        assert {c.partitions for c in classes.values()} == {("all.q",)}
        virtual_loop.jump(LAYOUT_MAX_AGE_S + 1)


def test_read_hosts_cuts_numbers_to_the_bounds_of_reports() -> None:
    answer = add_resources(make_qhost(h1="9999999T"), "h1", 16384).replace("'num_proc'>8", "'num_proc'>99999")
    host = read_hosts(answer.encode())["h1"]
    assert (host.memory, host.cores, host.gpus) == (MAX_MEMORY, MAX_CORES, (Gpus(MAX_GPUS),))


@pytest.mark.parametrize(
    ("requirement", "options"),
    [
        (NodeRequirement(features=("ib",)), ["-l", "h=h2-1"]),
        (NodeRequirement(gpus=Gpus(2)), ["-l", "h=h2-1"]),
        (NodeRequirement(cores=8, memory=GB), []),
        (NodeRequirement(exclude=("h2-[2-3]",)), ["-l", "h=h2-1|h2-4"]),
        (NodeRequirement(partition="all.q"), ["-q", "all.q"]),
        (NodeRequirement(account="climate"), ["-P", "climate"]),
    ],
)
async def test_requirement_becomes_options_of_qsub(
    engine: FakeGridEngine,
    control: RememberingControl,
    tmp_path: Path,
    requirement: NodeRequirement,
    options: list[str],
) -> None:
    whole = make_qhost(h2_1="31.2G", h2_2="31.2G", h2_3="31.2G", h2_4="31.2G")
    engine.set_answer("qhost", add_resources(whole, "h2-1", 2))
    adapter = engine.make_lrm(control, allowed_account=["climate"])
    await adapter.submit_job(replace(make_submission(tmp_path, 1), requirement=requirement))
    plain = engine.make_lrm(control)
    await plain.submit_job(make_submission(tmp_path, 1))
    with_requirement, without = control.native
    assert [word for word in with_requirement if word not in without] == [
        word for word in options if word not in without
    ]
    assert "".join(options) in "".join(with_requirement)


@pytest.mark.parametrize(
    ("requirement", "problem", "fault"),
    [
        (NodeRequirement(features=("ib",)), "2 nodes with feature ib requested, but it has 1", "limit"),
        (NodeRequirement(partition="long.q"), "with partition long.q requested, but it has 0", "limit"),
        (NodeRequirement(exclude=("h2-[1-3]",)), "2 nodes that are not excluded requested, but it has 1", "limit"),
        (NodeRequirement(exclude=("h2-[3-1]",)), "exclude cannot be understood", "job"),
        (NodeRequirement(account="other"), "account other may not be chosen here", "unsuitable"),
        (NodeRequirement(qos="high"), "Grid Engine has no quality of service high", "unsuitable"),
    ],
)
async def test_requirement_that_cannot_be_met_is_rejected(
    engine: FakeGridEngine,
    control: RememberingControl,
    tmp_path: Path,
    requirement: NodeRequirement,
    problem: str,
    fault: str,
) -> None:
    whole = make_qhost(h2_1="31.2G", h2_2="31.2G", h2_3="31.2G", h2_4="31.2G")
    engine.set_answer("qhost", add_resources(whole, "h2-1", 2))
    with pytest.raises(SiteRejected, match=problem) as rejected:
        await engine.make_lrm(control).submit_job(replace(make_submission(tmp_path, 2), requirement=requirement))
    assert rejected.value.fault == fault
    assert control.native == []


@given(
    st.binary(max_size=60)
    | st.text(max_size=40).map(lambda text: make_qhost(h1=text.replace("<", "")).encode("utf-8", "replace"))
)
def test_read_hosts_accepts_any_answer(text: bytes) -> None:
    assert all(host.memory is None or host.memory > 0 for host in read_hosts(text).values())
