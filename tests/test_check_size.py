"""Tests of the program that holds the budgets of lines."""

from pathlib import Path

from tests.check_size import (
    fields_by_class,
    import_circles,
    lines_by_package,
    module_imports,
    over_budget,
    repeated_classes,
)


def write_package(root: Path, **modules: str) -> Path:
    package = root / "grid"
    for name, text in modules.items():
        path = package.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


def test_over_budget_names_packages_above_it_or_without_one(tmp_path: Path) -> None:
    package = write_package(tmp_path, model__job="a = 1\nb = 2\n", store__tables="c = 3\n", api__jobs="d = 4\n")
    lines = lines_by_package(package)
    assert lines == {"api": 1, "model": 2, "store": 1}
    assert not list(over_budget(lines, lines))
    findings = list(over_budget(lines, {"model": 1, "store": 1, "cli": 5}))
    assert [finding.split()[0] for finding in findings] == ["api", "cli", "model"]
    assert "has 2 lines, its budget is 1" in findings[2]


def test_repeated_classes_share_most_fields_of_the_smaller_one(tmp_path: Path) -> None:
    def write_class(name: str, fields: str) -> str:
        return f"class {name}:\n" + "".join(f"    {field}: int\n" for field in fields)

    source = write_class("Job", "abcdefgh") + write_class("JobView", "abcdexyz") + write_class("Cluster", "stuvwxyz")
    fields = fields_by_class(write_package(tmp_path, job=source))
    assert repeated_classes(fields) == [(5, "job.py:Job", "job.py:JobView")]


def test_import_circles_include_late_and_typing_imports(tmp_path: Path) -> None:
    package = write_package(
        tmp_path,
        a="from grid import b\n",
        b="if TYPE_CHECKING:\n    from grid.c import C\n",
        c="def f():\n    import grid.a\n",
        d="from grid.a import A\n",
    )
    assert import_circles(module_imports(package)) == [["grid.a", "grid.b", "grid.c"]]
