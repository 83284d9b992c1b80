"""A module of the current folder or of Python's path, and what it imports from that folder: found, and hashed, without
running any of it."""

import ast
import hashlib
import importlib.util
import os
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
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

from core.files import file_sha256
from core.schema import require

LARGEST = 2**24  # bytes of a source file


class Source(SourceFileLoader):
    """Runs the bytes that were hashed: __pycache__ may hold other code."""

    @cached_property
    def content(self) -> bytes:
        require(os.path.getsize(self.path) <= LARGEST, f"{self.path} is too large for a module")
        return self.get_data(self.path)

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.content, self.path)


class Finder:
    """Answers for the modules that were found, and hides what else is in their packages: the current folder need not be
    on the path."""

    def __init__(self) -> None:
        self.specs: dict[str, ModuleSpec] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.specs and name.partition(".")[0] in self.specs:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return self.specs.get(name)


FINDER = Finder()


@dataclass(frozen=True)
class Found:
    """A module, as found in the current folder with what it imports from there, or (`local` is false) on the path."""

    name: str
    specs: dict[str, ModuleSpec]
    local: bool

    @cached_property
    def files(self) -> dict[str, str]:
        """Module -> SHA-256 of its file."""
        return {name: sha256_of(spec) for name, spec in self.specs.items() if spec.has_location}

    @property
    def sha256(self) -> str:
        """Of all of them."""
        return hashlib.sha256(str(sorted(self.files.items())).encode()).hexdigest()

    @property
    def file(self) -> str:
        return str(self.specs[self.name].origin)

    def has_changed(self) -> bool:
        """Whether a file is not what it was when it was found."""
        now = {name: Path(str(self.specs[name].origin)) for name in self.files}
        return any(not file.is_file() or file_sha256(file) != self.files[name] for name, file in now.items())


def sha256_of(spec: ModuleSpec) -> str:
    if isinstance(spec.loader, Source):
        return hashlib.sha256(spec.loader.content).hexdigest()
    return file_sha256(Path(str(spec.origin)))


def find_module(name: str, known: Collection[str] | None = None) -> Found | None:
    """None where there is no such module. known: hashes; a file with another one is not parsed."""
    specs = {} if is_loaded_elsewhere(name) else local_modules(name, os.getcwd(), known)
    found = Found(name, specs or installed_module(name), local=bool(specs))
    return found if found.specs else None


def local_modules(name: str, folder: str, known: Collection[str] | None) -> dict[str, ModuleSpec]:
    """A module of the folder, the packages around it, and what these import from the folder, in turn."""
    found: dict[str, ModuleSpec] = {}
    loaders = (ExtensionFileLoader, EXTENSION_SUFFIXES), (Source, SOURCE_SUFFIXES)

    def add(one: str) -> None:
        package = one.rpartition(".")[0]
        if package:
            add(package)
            places = found[package].submodule_search_locations if package in found else None
        else:
            places = [folder] if name.startswith(f"{one}.") or one == name or not is_elsewhere(one, folder) else None
        spec = FileFinder(places[0], *loaders).find_spec(one) if places and one not in found else None
        if spec is not None:
            found[one] = spec
            parsed = spec.has_location and (known is None or sha256_of(spec) in known)
            for other in sorted(imported_by(spec)) if parsed else ():
                add(other)

    add(name)
    files = [f"{one}." for one, spec in found.items() if spec.has_location]
    needed = {one: spec for one, spec in found.items() if any(file.startswith(f"{one}.") for file in files)}
    return needed if f"{name}." in files else {}


def imported_by(spec: ModuleSpec) -> set[str]:
    """What a module may import, at its top or in a function. A package counts whole."""
    found = set()
    for place in spec.submodule_search_locations or ():
        names = {file.partition(".")[0] for file in os.listdir(place)}
        found |= {f"{spec.name}.{name}" for name in names if name.isidentifier() and not name.startswith("__")}
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError, ImportError):  # the import says what is wrong
        for node in ast.walk(ast.parse(spec.loader.content if isinstance(spec.loader, Source) else b"")):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                base = importlib.util.resolve_name(base, spec.parent) if node.level else base
                found |= {base, *(f"{base}.{alias.name}" for alias in node.names if alias.name != "*")}
    return found


def is_loaded_elsewhere(name: str) -> bool:
    """Whether the process has the package, or the module, from another place than FINDER's."""
    top = name.partition(".")[0]
    return top in sys.modules and top not in FINDER.specs


def is_elsewhere(name: str, folder: str) -> bool:
    """Whether Python has it, its own or an installed one, or loaded, without a look into the folder."""
    if name in sys.stdlib_module_names or is_loaded_elsewhere(name):
        return True
    path = [entry for entry in sys.path if os.path.realpath(entry or ".") != folder]
    finders: list[Any] = [finder for finder in sys.meta_path if finder is not FINDER]
    return any(finder.find_spec(name, path if finder is PathFinder else None) for finder in finders)


def installed_module(name: str) -> dict[str, ModuleSpec]:
    """A module of Python's path, found without running the packages around it; {} where there is none."""
    top, *words = name.split(".")
    spec = None
    with suppress(ValueError):  # a module without a spec
        spec = importlib.util.find_spec(top)
    for word in words:
        places = None if spec is None else spec.submodule_search_locations
        spec = PathFinder.find_spec(f"{spec.name}.{word}", [*places]) if spec and places else None
    return {name: spec} if spec is not None and spec.has_location else {}
