"""The parser of qstat: recorded answers, invalid text, and arbitrary values in valid XML."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.lrm.sge.adapter import make_snapshot
from koalapy.agent.lrm.sge.answers import Listing, QueueInstance, read_hosts, read_listing
from koalapy.agent.lrm.sge.commands import Layout
from koalapy.model.errors import SiteUnavailable

ANSWERS = Path(__file__).with_name("answers")
NODES = tuple(f"h2-{n}" for n in (1, 2, 3, 4))
LAYOUT = Layout(2, frozenset(("all.q", node) for node in NODES))


def read_answer(name: str) -> bytes:
    return (ANSWERS / name).read_bytes()


def test_read_listing_of_active_jobs() -> None:
    listing = read_listing(read_answer("busy.xml"))
    assert [(entry.queue, entry.host, entry.total, entry.states) for entry in listing.instances] == [
        ("all.q", node, 2, "") for node in NODES
    ]
    jobs = {job.name: job for job in listing.jobs}
    assert sorted(jobs) == ["koala-h", "koala-m", "koala-q", "koala-x1", "koala-x2"]
    assert {name: (job.state, len(job.hosts), job.owner) for name, job in jobs.items()} == {
        "koala-h": ("hqw", 0, "koala"),
        "koala-m": ("r", 2, "koala"),
        "koala-q": ("qw", 0, "koala"),
        "koala-x1": ("r", 1, "koala"),
        "koala-x2": ("r", 1, "koala"),
    }


def test_read_listing_of_troubled_queues() -> None:
    listing = read_listing(read_answer("troubled.xml"))
    assert listing.instances == (
        QueueInstance("all.q", "h2-1", "d", 0, 0, 2),
        QueueInstance("all.q", "h2-2", "", 1, 0, 2),
        QueueInstance("all.q", "h2-3", "u", 0, 0, 2),
        QueueInstance("all.q", "h2-4", "", 2, 0, 2),
    )
    assert [(job.name, job.state, job.hosts) for job in listing.jobs] == [
        ("koala-sus", "s", ("h2-4",)),
        ("koala-err", "Eqw", ()),
    ]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"error: commlib error: got select error (Connection refused)\nerror: unable to send message",
        read_answer("busy.xml")[:700],
        b"<html><body>Service\nunavailable</body></html>",
        b"<job_info/>",
        b"<?xml version='1.0' encoding='nonsense'?><job_info/>",
        b"\x00\xff\xfe",
        read_answer("busy.xml").replace(b"<JB_job_number>", b"<JB_job_number>x"),
    ],
)
def test_read_listing_of_other_text_is_unavailable(text: bytes) -> None:
    with pytest.raises(SiteUnavailable, match=r"^qstat") as raised:
        read_listing(text)
    assert "\n" not in raised.value.message


def test_read_listing_with_invalid_queue_shows_it_down() -> None:
    text = read_answer("idle.xml").replace(b"all.q@h2-1", b"all.q", 1)
    assert {entry.host for entry in read_listing(text).instances} == set(NODES) - {"h2-1"}
    text = read_answer("idle.xml").replace(b"<slots_used>0<", b"<slots_used>none<", 1)
    snapshot = make_snapshot(read_listing(text), LAYOUT, (), ())
    assert (snapshot.total, snapshot.idle, snapshot.down) == (4, 3, 1)


FOREIGN = b"<job_list><JB_job_number>%b</JB_job_number><JB_name>%b</JB_name><state>qw</state></job_list>"


@pytest.mark.parametrize(
    "row",
    [
        FOREIGN % (b"x5", b"theirs"),
        FOREIGN % (b"", b""),
        FOREIGN % (b"5", b"a&b"),
        FOREIGN % (b"5", b"a&nbsp;b"),
        FOREIGN % (b"5", b"a<b> & <c"),
        b"<job_list/>",
    ],
)
@pytest.mark.parametrize("prefix", [b"", b"\n\n", b" \r\n"])
def test_read_listing_with_invalid_foreign_job_has_grid_jobs(row: bytes, prefix: bytes) -> None:
    job = FOREIGN % (b"9", b"koala-b")
    text = b"<?xml version='1.0'?><job_info><queue_info/><job_info>" + row + job + b"</job_info></job_info>"
    assert "9" in {entry.id for entry in read_listing(prefix + text).jobs}


ODD = [
    b"sim\xfc",
    b"sim\x01",
    b"sim&#1;",
    b"sim&#x1F;",
    b"sim&#xD800;",
    b"sim&#99999999999999999999999;",
    b"\xef\xbf\xbf",
]


@pytest.mark.parametrize("invalid", ODD)
def test_read_listing_accepts_names_of_any_bytes(invalid: bytes) -> None:
    """Otherwise a single job of a local user would make every poll fail."""
    listing = read_listing(read_answer("busy.xml").replace(b"<JB_name>koala-x1<", b"<JB_name>" + invalid + b"<"))
    assert len(listing.jobs) == 5
    assert [job.name for job in listing.jobs if job.name.startswith("koala-")] == [
        job.name for job in read_listing(read_answer("busy.xml")).jobs if job.name != "koala-x1"
    ]
    assert listing.instances == read_listing(read_answer("busy.xml")).instances


def test_read_listing_reads_character_references() -> None:
    listing = read_listing(read_answer("busy.xml").replace(b">koala-x1<", b">a&amp;b&#252;&#x20AC;&#xA;c<"))
    assert "a&bü€\nc" in {job.name for job in listing.jobs}


def test_read_hosts_beside_invalid_bytes() -> None:
    answer = b"<qhost><host name='h1'><hostvalue name='arch_string'>\xfc</hostvalue>"
    answer += b"<hostvalue name='mem_total'>2G</hostvalue></host></qhost>"
    assert read_hosts(answer)["h1"].memory == 2 << 30


letters = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)


HOSTS = st.sampled_from([*NODES, "elsewhere"])
INSTANCES = st.lists(
    st.builds(
        QueueInstance,
        queue=st.sampled_from(["all.q", "other.q"]),
        host=HOSTS,
        states=st.text("aAuEdsSCDPoc", max_size=2),
        used=st.integers(0, 2),
        reserved=st.integers(0, 1),
        total=st.integers(0, 2),
    ),
    max_size=8,
)


@given(INSTANCES, st.sets(HOSTS))
def test_snapshot_counts_each_node_once(instances: list[QueueInstance], held_nodes: set[str]) -> None:
    snapshot = make_snapshot(Listing(tuple(instances), ()), LAYOUT, held_nodes, ())
    hosts = {entry.host for entry in instances if (entry.queue, entry.host) in LAYOUT.instances}
    assert min(snapshot.idle, snapshot.background, snapshot.down) >= 0
    assert snapshot.total == len(hosts)
    assert snapshot.total - snapshot.idle - snapshot.background - snapshot.down == len(hosts & held_nodes)
