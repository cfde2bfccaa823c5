"""Fair share with weights that operators set."""

from collections.abc import Callable

import pytest

from tests.grid.embedded import EmbeddedGrid

pytestmark = pytest.mark.processes

ONE = {"type": "flexible", "total_size": 1}


def test_set_weight_holds_after_restart_of_daemon(make_grid: Callable[..., EmbeddedGrid]) -> None:
    grid = make_grid(KOALA_RULES__QUEUE_ORDER="fair-share")
    job = grid.submit(ONE, "sleep", "1")
    assert grid.wait_for_end(job)["state"] == "succeeded"
    user = grid.get_job(job)["owner"]

    def weights() -> dict[str, tuple[float, str]]:
        """Return the weight of each user as the scheduler counts it, and why it was set."""
        shares = grid.http.get("/api/v1/limits/shares").json()["shares"]
        return {s["user"]: (s["weight"], (s["set_weight"] or {}).get("reason", "")) for s in shares}

    assert weights() == {user: (1.0, "")}
    for name, *weight in ((user, "--weight", "4"), ("bob", "--weight", "3"), ("bob",)):
        answer = grid.run_koala("share", "--user", name, *weight, "--reason", "a deadline")
        assert answer.returncode == 0, answer.stderr
    assert weights() == {user: (4.0, "a deadline")}
    grid.kill_daemon()
    grid.start()
    assert weights() == {user: (4.0, "a deadline")}
