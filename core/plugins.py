"""Plugins: modules of one's own that register variants, as in plugins=[my_norm], and the slots that variants fill.

A plugin is found by its name in the current folder or on Python's path. Nothing is imported from a run directory.
"""

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from core.files import FOLDERS, file_sha256
from core.schema import ConfigError, declared, require

# -----------------------------------------------------------------------------
# Variants


class Slot(dict[str, Any]):
    """What a group of settings can be: NAME -> the class that is built from its options, ours and those of plugins.

    options: NAME -> their class; its base class has the slot as `slot`.
    base: "module:Class", from which what is built derives; "" where the options are all there is.
    ours: the module that registers ours, or the package with a module for each NAME; it is imported when needed.
    """

    def __init__(self, base: str = "", ours: str = ""):
        super().__init__()
        self.base, self.ours, self.options = base, ours, dict[str, type]()

    def __missing__(self, name: str) -> Any:
        module = importlib.import_module(self.ours)
        if name not in self and hasattr(module, "__path__"):
            importlib.import_module(f"{self.ours}.{name}")
        require(name in self, f"{name}: no class is registered for its options")
        return self[name]


def register(options: Any, made: type | None = None) -> None:
    """Add a variant to the slot of its options. The default of `name` in `options` is what qk_norm=, optim=, ... take.

    made: the class that is built from them. Raises: ConfigError for another slot's class, and for a name that is taken
    or no lower-case word.
    """
    name = add_options(options.slot.options if hasattr(options, "slot") else {}, options)
    if options.slot.base:
        module, base = options.slot.base.split(":")
        good = isinstance(made, type) and issubclass(made, getattr(importlib.import_module(module), base))
        given = getattr(made, "__name__", made)
        require(good, f"{options.__name__} needs a class that derives from {base}, not {given}")
        options.slot[name] = made


def add_options(table: dict[str, type], options: type) -> str:
    """Add options to those of a slot, under the default of their `name`, which is returned."""
    require("__dataclass_params__" in vars(options), f"{options.__name__} needs @options (core.schema) above its class")
    group = "the options of its group, as QKNormOptions is for qk_norm="
    require(hasattr(options, "slot"), f"{options.__name__} must derive from {group}")
    name = declared(options)["name"].default
    require(name is not MISSING, f'{options.__name__} needs a name: write name: str = "my_word" in its class')
    plain = isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9_]*", name) is not None
    require(plain, f"{options.__name__}.name={name} must be a lower-case word")
    taken = table.get(name, options).__module__
    require(taken == options.__module__, f"{options.__name__}.name={name} is taken by {taken}")
    table[name] = options
    return name


# -----------------------------------------------------------------------------
# Modules

IMPORTED: dict[str, str] = {}  # SHA-256 of the plugins' files, of require_unchanged()


def load_plugins(names: Iterable[str]) -> None:
    """Import the modules. Raises: ConfigError that names the one that is missing or fails."""
    for name in names:
        require(all(part.isidentifier() for part in name.split(".")), f"plugins=[{name}] must be names of modules")
        if name in sys.modules:
            here, loaded = Path(f"{name.replace('.', '/')}.py").resolve(), getattr(sys.modules[name], "__file__", "")
            taken = here.is_file() and here != Path(loaded or "").resolve()
            require(not taken, f"plugins=[{name}]: {here} has the name of a module that is loaded already: rename it")
            continue
        try:
            import_plugin(name)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"plugins=[{name}] cannot be imported: {type(error).__name__}: {error}") from error


def import_plugin(name: str) -> None:
    """Import `name`, which may lie in the current folder."""
    plain = name.removesuffix(".py")
    require(plain == name, f"plugins=[{name}] must be names of modules: plugins=[{plain}]")
    here, words = os.getcwd(), name.split(".")
    sys.path.insert(0, here)
    try:
        importlib.invalidate_caches()  # the file may be younger than what was found in its folder before
        for module in (".".join(words[:n]) for n in range(1, len(words) + 1)):
            spec = importlib.util.find_spec(module)  # which imports the packages around it
            if spec is None:
                raise ConfigError(f"plugins=[{name}]: no module {module} in {here} or on the path")
            if spec.origin is not None and (run := run_directory(Path(spec.origin))):  # None: a folder without code
                why = f"is in the run directory {run}, from which nothing is imported"
                raise ConfigError(f"plugins=[{name}]: {spec.origin} {why}")
        importlib.import_module(name)
    finally:
        sys.path.remove(here)


def run_directory(file: Path) -> Path | None:
    """The run or sweep directory that a file lies in, if it does."""
    for folder in file.resolve().parents:
        if (folder / "config.yaml").exists() and ((folder / "ckpt").exists() or (folder / "status.json").exists()):
            return folder
        if any((folder / name).exists() for name in FOLDERS):
            return folder
    return None


def plugin_hashes(names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of each loaded plugin's file: what a run records."""
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    return {name: file_sha256(Path(file)) for name, file in files.items() if file}


def require_unchanged(names: Iterable[str]) -> None:
    """Raise ConfigError for a plugin whose file has changed since this process first asked: the old one would train."""
    for name, sha256 in plugin_hashes(names).items():
        same = IMPORTED.setdefault(name, sha256) == sha256
        require(same, f"plugins=[{name}] has changed since it was imported: start Python again")


def changed_plugins(recorded: Mapping[str, str]) -> list[str]:
    """What there is to say of the loaded plugins whose file is not the one that a run has recorded."""
    here = plugin_hashes(recorded)
    return [
        f"the plugin {name} has changed: its SHA-256 is {here.get(name, 'unknown')[:12]}, the run's {str(sha256)[:12]}"
        for name, sha256 in recorded.items()
        if here.get(name) != sha256
    ]
