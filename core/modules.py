"""A module of the current folder, or of Python's path: found and hashed without being run, with what it imports from
that folder."""

import ast
import hashlib
import importlib.util
import os
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from pathlib import Path
from types import CodeType
from typing import Any

from core.files import ANYWHERE, file_sha256, read_regular

SUFFIXES = (*SOURCE_SUFFIXES, *EXTENSION_SUFFIXES)


@dataclass(frozen=True)
class Found:
    """files: those of the module, below `folder`, with their SHA-256. main: its own. local: to the current folder;
    then what it imports from there is among its files."""

    folder: str
    main: str
    files: dict[str, str]
    local: bool

    @property
    def path(self) -> str:
        return os.path.join(self.folder, self.main)

    @property
    def sha256(self) -> str:
        """Of all files."""
        return hashlib.sha256(str(sorted(self.files.items())).encode()).hexdigest()

    def paths(self) -> dict[str, str]:
        return {os.path.join(self.folder, file): sha256 for file, sha256 in self.files.items()}

    def has_changed(self) -> bool:
        return any(
            not Path(file).is_file() or file_sha256(Path(file)) != sha256 for file, sha256 in self.paths().items()
        )


class Source(SourceFileLoader):
    """Runs the bytes that were hashed: __pycache__ may hold other code."""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        if hashlib.sha256(source).hexdigest() != FINDER.files.get(self.path):
            raise ImportError(f"{self.path} has changed since it was found")
        return self.source_to_code(source, self.path)


class Finder:
    """Answers for the modules in `files`, so that their folder need not be on the path. folders: of each top name."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.folders: dict[str, str] = {}

    def add(self, found: Found) -> None:
        self.files |= found.paths()
        self.folders |= {Path(file).parts[0].partition(".")[0]: found.folder for file in found.files}
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        folder = self.folders.get(name.partition(".")[0])
        if folder is None:
            return None
        loaders = (ExtensionFileLoader, EXTENSION_SUFFIXES), (Source, SOURCE_SUFFIXES)
        spec = FileFinder(next(iter(path or [folder])), *loaders).find_spec(name)
        if spec is None or (spec.has_location and spec.origin not in self.files):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return spec


FINDER = Finder()


def find_module(name: str, known: Collection[str] | None = None) -> Found | None:
    """None where there is no such module. known: hashes; a file with another one is not parsed."""
    folder, path = os.getcwd(), name.replace(".", "/")
    files = {} if is_loaded(name) else local_files(name.partition(".")[0], folder, known)
    for main in (f"{path}/__init__.py", *(path + suffix for suffix in SUFFIXES)):
        if main in files:
            return Found(folder, main, files, local=True)
    file = installed_file(name)
    return None if file is None else Found(str(file.parent), file.name, {file.name: file_sha256(file)}, local=False)


def local_files(name: str, folder: str, known: Collection[str] | None) -> dict[str, str]:
    """The files of a module or a package, which counts whole, and of those that it imports from the folder, in turn."""
    found: dict[str, str] = {}
    seen, waiting = set(), [name]
    while waiting:
        one = waiting.pop()
        if one in seen or (one != name and is_elsewhere(one, folder)):
            continue
        seen.add(one)
        files = [Path(folder, one + suffix) for suffix in SUFFIXES]
        files += [file for file in Path(folder, one).rglob("*") if file.name.endswith(SUFFIXES)]
        for file in filter(Path.is_file, files):
            found[str(file.relative_to(folder))] = sha256 = file_sha256(file)
            if file.suffix == ".py" and (known is None or sha256 in known):
                waiting += imported_by(read_regular(file, within=ANYWHERE))
    return found


def imported_by(source: bytes) -> set[str]:
    """The top names that it may import, at its top or in a function."""
    found = set()
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):  # the import says what is wrong
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found


def is_loaded(name: str) -> bool:
    """Whether the process has it, or the package around it, from elsewhere than FINDER."""
    top = name.partition(".")[0]
    return top in sys.modules and top not in FINDER.folders


def is_elsewhere(name: str, folder: str) -> bool:
    """Whether Python has it without a look into the folder: its own, an installed or a loaded one."""
    if name in sys.stdlib_module_names or is_loaded(name):
        return True
    path = [entry for entry in sys.path if os.path.realpath(entry or ".") != folder]
    finders: list[Any] = [finder for finder in sys.meta_path if finder is not FINDER]
    return any(finder.find_spec(name, path if finder is PathFinder else None) for finder in finders)


def installed_file(name: str) -> Path | None:
    """The file of a module of Python's path, found without running the packages around it."""
    top, *words = name.split(".")
    spec = None
    with suppress(ValueError):  # a module without a spec
        spec = importlib.util.find_spec(top)
    for word in words:
        places = None if spec is None else spec.submodule_search_locations
        spec = PathFinder.find_spec(f"{spec.name}.{word}", [*places]) if spec and places else None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None
