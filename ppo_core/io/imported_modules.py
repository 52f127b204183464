"""List the modules of the project whose code affects a result, such as a trained model."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path


def imported_modules(*entries: str) -> tuple[str, ...]:
    """Return the sorted names of modules, and of all modules that they import.

    Indirect imports are included, but only of ppo_core and of the packages of `entries`. The names
    are read from the import statements in the source files. No module is imported, so torch is not
    needed.
    """
    packages = {name: _folder(name) for name in ("ppo_core", *(e.split(".")[0] for e in entries))}
    found: set[str] = set()
    waiting = [*entries]
    while waiting:
        name = waiting.pop()
        root, *parts = name.split(".")
        path = _path(packages[root].joinpath(*parts)) if root in packages else None
        if name in found or path is None:
            continue
        found.add(name)
        waiting += [name.rpartition(".")[0], *_imported_names(path)]
    return tuple(sorted(found))


def _folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return Path(spec.origin).parent


def _path(module: Path) -> Path | None:
    """Return the file of a package or module; None for a class or a function."""
    candidates = (module / "__init__.py", module.with_suffix(".py"))
    return next((path for path in candidates if path.is_file()), None)


def _imported_names(path: Path) -> Iterator[str]:
    """Yield the dotted names of all modules, classes and functions that a file imports."""
    for statement in _executed_statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            yield statement.module
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


def _executed_statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the statements of a file except `if TYPE_CHECKING` blocks, which never run."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        yield node
        for block in ("body", "orelse", "handlers", "finalbody", "cases"):
            waiting += getattr(node, block, ())
