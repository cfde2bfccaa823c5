"""Lists of host names in the short form of Slurm."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.node_requirement import compress_host_list, count_hosts, expand_host_list


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3,7],m1", ["n1", "n2", "n3", "n7", "m1"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]n[1-2].site", ["r1n1.site", "r1n2.site", "r2n1.site", "r2n2.site"]),
        ("n[001,003]-ib,gpu-a", ["n001-ib", "n003-ib", "gpu-a"]),
    ],
)
def test_expand_host_list_of_short_forms(text: str, names: list[str]) -> None:
    assert expand_host_list(text) == names
    assert count_hosts(text) == len(names)


@pytest.mark.parametrize(
    "text",
    [
        "n[",
        "n]",
        "n[]",
        "n[1",
        "n[a]",
        "n[3-1]",
        "n[1-]",
        "n[-1]",
        "n[1,]",
        "a,",
        ",a",
        "a,,b",
        "a b",
        "n[[1]]",
        "n[²]",
        "n[1-999999999]",
        "n[1-9999]m[1-9999]",
        "n[1-90000],m[1-90000]",
    ],
)
def test_expand_host_list_of_other_text_fails(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of host names"):
        expand_host_list(text)


NAME = st.from_regex(r"[a-z][a-z.-]{0,3}", fullmatch=True)
WIDTH = st.integers(1, 4)


@given(st.lists(st.tuples(NAME, WIDTH, st.lists(st.integers(0, 9000), min_size=1, max_size=4)), min_size=1, max_size=4))
def test_expand_host_list_restores_names(parts: list[tuple[str, int, list[int]]]) -> None:
    text = ",".join(f"{name}[{','.join(str(n).zfill(width) for n in numbers)}]" for name, width, numbers in parts)
    assert expand_host_list(text) == [f"{name}{str(n).zfill(width)}" for name, width, numbers in parts for n in numbers]


@given(NAME, st.integers(0, 2000), st.integers(0, 200), WIDTH)
def test_expand_host_list_of_range_counts(name: str, first: int, count: int, width: int) -> None:
    names = expand_host_list(f"{name}[{str(first).zfill(width)}-{str(first + count).zfill(width)}]")
    assert names == [f"{name}{str(n).zfill(width)}" for n in range(first, first + count + 1)]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("", ""),
        ("n3 m1 n1 n2", "m1,n[1-3]"),
        ("n8 n9 n10 n11 n13", "n[8-9],n[10-11],n13"),
        ("n08 n09 n10 n9", "n9,n[08-10]"),
        ("r1n1 r1n2 r2n1 login", "login,r1n[1-2],r2n1"),
        ("1 2 11 12 n2.site n3.site", "1,1[1-2],2,n2.site,n3.site"),
        ("x0999999999 x1000000000", "x0999999999,x1000000000"),
    ],
)
def test_compress_host_list_joins_numbers_at_the_end(names: str, text: str) -> None:
    assert compress_host_list(names.split()) == text


@given(st.sets(st.from_regex(r"[a-c0-2]{1,3}[0-9.]{0,11}", fullmatch=True), max_size=40))
def test_expand_host_list_restores_compressed_names(names: set[str]) -> None:
    restored = expand_host_list(compress_host_list(names))
    assert (len(restored), set(restored)) == (len(names), names)


@given(st.text(alphabet="n1-,[] 0m", max_size=12))
def test_expand_host_list_of_any_text_returns_or_fails(text: str) -> None:
    try:
        names = expand_host_list(text)
    except ValueError:
        return
    assert all(name and not set(name) & set("[], ") for name in names)
