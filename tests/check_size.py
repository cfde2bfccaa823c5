"""Check the budget of lines of each package, and count repeated facts: ``python -m tests.check_size [--table]``.

``[tool.koalapy.lines]`` in ``pyproject.toml`` holds the budgets. ``--table`` (``make size``) prints what the rules of
``docs/architecture.md`` are about: lines, classes that repeat each other's fields, and import circles of files.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "koalapy"
MIN_SHARED_FIELDS = 5
MIN_SHARE = 0.6
"""Two classes repeat each other if the smaller one shares so many of its fields, and so large a part of them."""
_TABLE = "SQL table at line "
"""What names the columns of a table in place of a class."""


def count_lines(path: Path) -> int:
    """Return the lines of a Python file, or of all Python files in a folder."""
    paths = path.rglob("*.py") if path.is_dir() else [path]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in paths)


def lines_by_package(package: Path = PACKAGE) -> dict[str, int]:
    """Return the lines of each folder and each file directly in the package."""
    lines = {entry.name: count_lines(entry) for entry in sorted(package.iterdir()) if entry.suffix in ("", ".py")}
    return {name: count for name, count in lines.items() if count}


def over_budget(lines: Mapping[str, int], budgets: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each package that has more lines than its budget, or none."""
    for name in sorted(lines.keys() | budgets.keys()):
        if name not in budgets:
            yield f"{name} has no budget: add it to [tool.koalapy.lines] in pyproject.toml"
        elif name not in lines:
            yield f"{name} has a budget but no files: remove it from [tool.koalapy.lines] in pyproject.toml"
        elif lines[name] > budgets[name]:
            yield (
                f"{name} has {lines[name]:,} lines, its budget is {budgets[name]:,}: find what the change replaces, "
                "or raise the budget in pyproject.toml and say in the commit why"
            )


def fields_by_class(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Return the declared fields of each class that has any, and the columns of each SQL table."""
    fields: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names = {
                    statement.target.id
                    for statement in node.body
                    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
                }
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Table":
                calls = [argument for argument in node.args if isinstance(argument, ast.Call) and argument.args]
                names = {
                    call.args[0].value
                    for call in calls
                    if isinstance(call.args[0], ast.Constant)
                    and isinstance(call.args[0].value, str)
                    and isinstance(call.func, ast.Name)
                    and call.func.id == "Column"
                }
            else:
                continue
            if names:
                label = node.name if isinstance(node, ast.ClassDef) else f"{_TABLE}{node.lineno}"
                fields[f"{module}:{label}"] = names
    return fields


def _is_table(name: str) -> bool:
    return f":{_TABLE}" in name


def repeated_classes(fields: Mapping[str, set[str]]) -> list[tuple[int, str, str]]:
    """Return the pairs of classes that repeat each other: shared fields and both names, most first."""
    large = {name: names for name, names in fields.items() if len(names) >= MIN_SHARED_FIELDS and not _is_table(name)}
    pairs = []
    for (first, names), (second, others) in combinations(large.items(), 2):
        shared = len(names & others)
        if shared >= MIN_SHARED_FIELDS and shared >= MIN_SHARE * min(len(names), len(others)):
            pairs.append((shared, first, second))
    return sorted(pairs, reverse=True)


def module_imports(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Return the modules of the package that each module imports, also late and for type checking."""
    paths = {_module_name(path, package): path for path in package.rglob("*.py")}
    return {name: set(_imports(path, paths)) & paths.keys() - {name} for name, path in paths.items()}


def _module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)


def import_circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other (strongly connected components), largest first."""
    reached = {name: _reachable(name, imports) for name in imports}
    circles = {
        frozenset(other for other in reached[name] if name in reached[other]) | {name}
        for name in imports
        if name in reached[name]
    }
    return sorted((sorted(circle) for circle in circles), key=len, reverse=True)


def _reachable(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    pending = list(imports[start])
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += imports[name]
    return reached


def print_table(lines: Mapping[str, int], budgets: Mapping[str, int]) -> None:
    fields = fields_by_class()
    declared, names = sum(map(len, fields.values())), set().union(*fields.values())
    pairs, circles = repeated_classes(fields), import_circles(module_imports())
    largest = max((name for name in fields if not _is_table(name)), key=lambda name: len(fields[name]))
    by_module = {path.relative_to(PACKAGE).as_posix(): count_lines(path) for path in PACKAGE.rglob("*.py")}
    longest = max(by_module, key=by_module.__getitem__)
    for name, count in sorted(lines.items(), key=lambda entry: -entry[1]):
        print(f"{name:<12} {count:>7,} of {budgets.get(name, 0):>7,} lines")
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    print(f"koalapy/     {sum(by_module.values()):>7,} lines in {len(by_module)} files, longest {longest}")
    print(f"tests/       {count_lines(ROOT / 'tests'):>7,} lines")
    print(f"{len(entries)} entries directly in koalapy/")
    print(f"{declared:,} fields with {len(names):,} names, {declared / len(names):.1f} for each; most in {largest}")
    print(f"{len(pairs)} pairs of classes share {MIN_SHARE:.0%} of their fields")
    for shared, first, second in pairs:
        print(f"  {shared:>3} {first} ({len(fields[first])}), {second} ({len(fields[second])})")
    print(f"{len(circles)} import circles of files")
    for circle in circles:
        print("  " + ", ".join(circle))


def main() -> None:
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["koalapy"]["lines"]
    lines = lines_by_package()
    if "--table" in sys.argv[1:]:
        print_table(lines, budgets)
        return
    if findings := list(over_budget(lines, budgets)):
        sys.exit("\n".join(findings))
    print(f"each package is within its budget of lines; all have {sum(lines.values()):,}")


if __name__ == "__main__":
    main()
