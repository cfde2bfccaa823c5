import pytest

# Before they are imported: these packages also assert outside of test modules, as in an engine's task.
pytest.register_assert_rewrite("tests.fuzz", "tests.scheduler")
