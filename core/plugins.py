"""Plugins: modules of one's own that register variants of the model's groups, as in plugins=[my_norm].

A plugin is found by its name in the current folder or on Python's path. Nothing is imported from a run directory.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from core.files import FOLDERS, file_sha256
from core.schema import ConfigError, require


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


def changed_plugins(recorded: Mapping[str, str]) -> list[str]:
    """What there is to say of the loaded plugins whose file is not the one that a run has recorded."""
    here = plugin_hashes(recorded)
    return [
        f"the plugin {name} has changed: its SHA-256 is {here.get(name, 'unknown')[:12]}, the run's {sha256[:12]}"
        for name, sha256 in recorded.items()
        if here.get(name) != sha256
    ]
