"""Node classes of Grid Engine."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.lrm.node_classes import NodeClassSettings
from koalapy.agent.lrm.port import LrmSubmission
from koalapy.agent.lrm.sge.answers import read_memory
from koalapy.model.errors import SiteRejected

from .conftest import FakeGridEngine, RememberingControl

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


async def test_nodes_of_equal_memory_have_unnamed_class(engine: FakeGridEngine, control: RememberingControl) -> None:
    engine.set_answer("qhost", make_qhost(h2_1="31.2G", h2_2="31.3G", h2_3="31.1G", h2_4="31.2G"))
    (expected,) = (await engine.make_lrm(control).take_snapshot()).node_classes
    assert (expected.name, expected.total, expected.idle, expected.memory) == ("", 4, 4, int(31.1 * 2**30))


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


async def test_snapshot_without_qhost_has_no_classes(engine: FakeGridEngine, control: RememberingControl) -> None:
    engine.set_answer("qhost", "no such thing", code=1)
    assert (await engine.make_lrm(control).take_snapshot()).node_classes == ()
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
def test_read_memory_of_sizes(size: str, expected: int | None) -> None:
    assert read_memory(make_qhost(h1=size).encode()).get("h1") == expected


@given(
    st.binary(max_size=60)
    | st.text(max_size=40).map(lambda text: make_qhost(h1=text.replace("<", "")).encode("utf-8", "replace"))
)
def test_read_memory_accepts_any_answer(text: bytes) -> None:
    assert all(size > 0 for size in read_memory(text).values())
