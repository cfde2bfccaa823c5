"""Pages that many browsers share: compression with gaps, and the token of each session in the forms."""

import gzip
import re
from contextlib import closing

from hypothesis import given
from hypothesis import strategies as st

from koalapy.dashboard.shared_pages import compress_page
from tests.daemon_in_process import ServedDaemon
from tests.dashboard.people import Person, create_token

PLACEHOLDER = "5f" * 32


@given(st.lists(st.text(max_size=300), min_size=1, max_size=5), st.binary(max_size=70))
def test_page_has_inserted_text_in_each_gap(pieces: list[str], inserted: bytes) -> None:
    page = compress_page(PLACEHOLDER.join(pieces), PLACEHOLDER)
    expected = inserted.join(piece.encode() for piece in pieces)
    assert page.as_bytes(inserted) == expected
    assert gzip.decompress(page.as_gzip(inserted)) == expected


def test_shared_part_has_token_of_each_session(daemon: ServedDaemon) -> None:
    parts = {"HX-Request": "true"}
    seen = []
    for name in ("olga", "oscar"):
        with closing(Person(daemon, create_token(daemon, name, "operator"))) as person:
            text = person.http.get("/clusters/north", headers=parts).text
            (token,) = set(re.findall(r'name="csrf" value="([^"]*)"', text))
            assert token in person.get_page("/clusters/north")
            form = {"csrf": token, "reason": f"by {name}"}
            assert person.http.post("/clusters/north/drain", data=form, headers=person.origin).status_code == 303
            seen.append(token)
            daemon.http.post("/api/v1/clusters/north/resume", json={}).raise_for_status()
    assert seen[0] != seen[1]
