"""List the modules of ppo_core whose code affects the result of a training."""

import ast
from collections.abc import Iterator
from pathlib import Path

import ppo_core

_PACKAGE = Path(ppo_core.__file__).parent


def modules_of_training(entry: str) -> tuple[str, ...]:
    """Return the sorted names of `entry` and of all ppo_core modules that it imports.

    Indirect imports are included. The names are read from the import statements in the source
    files. No module is imported, so torch is not needed.
    """
    found: set[str] = set()
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        path = _path(name)
        if name in found or path is None:
            continue
        found.add(name)
        waiting += [name.rpartition(".")[0], *_imported_names(path)]
    return tuple(sorted(found))


def _path(name: str) -> Path | None:
    """Return the file of a module of ppo_core; None for any other name."""
    root, *parts = name.split(".")
    if root != _PACKAGE.name:
        return None
    base = _PACKAGE.joinpath(*parts)
    candidates = (base / "__init__.py", base.with_suffix(".py"))
    return next((path for path in candidates if path.is_file()), None)


def _imported_names(path: Path) -> Iterator[str]:
    """Yield the dotted names of all modules, classes and functions that a file imports."""
    for node in _executed_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _executed_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree except `if TYPE_CHECKING` blocks, which never run."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from _executed_nodes(node)
