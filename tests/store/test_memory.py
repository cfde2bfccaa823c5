"""Stores in memory: chosen by their URL, gone with their daemon, used by several threads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from koalapy.model.errors import UsageError
from koalapy.ports import StoredBundle
from koalapy.store.opening import open_stores
from koalapy.store.output import FileOutput
from tests.memory_stores import memory_stores
from tests.store.jobs import a_job, batch


def test_stores_in_memory_share_nothing() -> None:
    first, second = memory_stores(), memory_stores()
    first.jobs.write(batch(a_job(1)))
    assert second.jobs.job(1) is None
    assert first.jobs.instance != second.jobs.instance


def test_unknown_url_is_refused_with_the_urls_that_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        open_stores("mysql://localhost/koala", FileOutput(tmp_path, 100))
    assert "memory:" in (error.value.hint or "")


def test_threads_use_stores_in_memory_in_turn() -> None:
    stores = memory_stores()

    def write_and_read(ident: int) -> bool:
        stores.files.save_bundles([StoredBundle(str(ident), 1, 1, 1.0)])
        return str(ident) in {bundle.id for bundle in stores.files.bundles()}

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(write_and_read, range(1, 41)))
    assert len(stores.files.bundles()) == 40
