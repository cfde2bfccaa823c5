"""Stores in memory."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from koalapy.model.errors import UsageError
from koalapy.store.opening import open_stores
from koalapy.store.output import OutputStore
from koalapy.store.records import StoredBundle
from tests.memory_stores import memory_stores
from tests.store.jobs import make_batch, make_job


def test_memory_stores_share_no_data() -> None:
    first, second = memory_stores(), memory_stores()
    first.jobs.write(make_batch(make_job(1)))
    assert second.jobs.job(1) is None
    assert first.jobs.instance != second.jobs.instance


def test_open_stores_with_unknown_url_hints_valid_urls(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        open_stores("mysql://localhost/koala", OutputStore(tmp_path, 100))
    assert "memory:" in (error.value.hint or "")


def test_memory_stores_are_usable_from_threads() -> None:
    stores = memory_stores()

    def write_and_read(ident: int) -> bool:
        stores.files.save_bundles([StoredBundle(str(ident), 1, 1, 1.0)])
        return str(ident) in {bundle.id for bundle in stores.files.bundles()}

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(write_and_read, range(1, 41)))
    assert len(stores.files.bundles()) == 40
