"""Plugins: modules of one's own that register variants, as in plugins=[my_norm], and the slots that variants fill.

A plugin is found by its name in the current folder or on Python's path, never in a run directory. A run, a checkpoint
or a plan only names plugins: they are imported if the user has named them, or trained with them as they are now.
"""

import importlib
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any

from core.files import FOLDERS, FileLock, config_folder, read_json, write_json
from core.modules import FINDER, Found, find_module
from core.schema import ConfigError, declared, one_line, require

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
    """Add options, and the class `made` that is built from them, to their slot. The default of `name` is what qk_norm=
    and so on take. Raises: ConfigError for another slot's class, and for a name that is taken or not lower-case."""
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
    taken = table.get(name, options)  # a module that is imported again registers the same class again
    same = (taken.__module__, taken.__name__) == (options.__module__, options.__name__)
    require(same, f"{options.__name__}.name={name} is taken by {taken.__module__}.{taken.__name__}")
    table[name] = options
    return name


# -----------------------------------------------------------------------------
# Modules

LOADED: dict[str, Found] = {}
NAMED: set[str] = set()  # by the user
ENVIRONMENT = "NANOQK_PLUGINS"  # names, A,B; from a process of ours A=SHA256
TRAINED = "plugins.json"  # in the user's configuration folder: plugin -> the files of it that the user has trained with


def load_plugins(names: Iterable[str]) -> None:
    """Import plugins that the user names, in a command or a file that it names. Raises: ConfigError for one that is
    missing, fails, or has changed since it was imported."""
    for name in names:
        check_name(name)
        if name in LOADED:
            changed = f"plugins=[{name}] has changed since it was imported: start Python again"
            require(not LOADED[name].has_changed(), changed)
        else:
            import_plugin(name, find_plugin(name))
        NAMED.add(name)


def load_stored(names: Sequence[str]) -> None:
    """Import plugins that a run, a checkpoint or a plan names. Raises: ConfigError for one that the user has neither
    named, here or in $NANOQK_PLUGINS, nor trained with as it is now; and as load_plugins()."""
    named = in_environment()
    for name in [name for name in names if name not in LOADED]:
        check_name(name)
        if name in named:
            found = find_plugin(name)
            other = f"plugins=[{name}]: {found.path}, or what it imports, is not as it was when the sweep was launched"
            require(named[name] in ("", found.sha256), other)
        else:
            trained = trained_with(name)
            found = find_plugin(name, [sha256 for files in trained for sha256 in files.values()])
            never = f"you have not trained with {found.path} and what it imports as they are now"
            advice = f"look at it, then add plugins=[{','.join(names)}]"
            require(found.files in trained, f"plugins=[{name}] is the run's, and {never}: {advice}")
        import_plugin(name, found)


def check_name(name: str) -> None:
    """Raise ConfigError where it can be no plugin's."""
    said, words, plain = f"plugins=[{name}]", name.split("."), name.removesuffix(".py")
    require(all(word.isidentifier() for word in words), f"{said} must be names of modules")
    require(plain == name, f"{said} must be names of modules: plugins=[{plain}]")
    standard = words[0] in sys.stdlib_module_names or any(word.startswith("__") for word in words)
    require(not standard, f"{said} registers no variant: the name is that of a module of Python itself")
    if name in sys.modules:
        here, loaded = Path(*words).with_suffix(".py").resolve(), getattr(sys.modules[name], "__file__", "")
        taken = here.is_file() and here != Path(loaded or "").resolve()
        require(not taken, f"{said}: {here} has the name of a module that is loaded already: rename it")


def find_plugin(name: str, known: Collection[str] | None = None) -> Found:
    """The plugin of that name; nothing is run. known: as in find_module(). Raises: ConfigError."""
    try:
        found = find_module(name, known)
    except OSError as error:
        raise ConfigError(f"plugins=[{name}] cannot be read: {error.strerror}") from error
    if found is None:
        advice = f"start in the folder that has {name.split('.')[0]}.py, or set PYTHONPATH to it"
        raise ConfigError(f"plugins=[{name}]: no module {name} in {os.getcwd()} or on the path: {advice}")
    run = run_directory(found.path)
    why = f"is in the run directory {run}, from which nothing is imported"
    require(run is None, f"plugins=[{name}]: {found.path} {why}")
    outside = {file: found.files[file] for file in found.files if run_directory(f"{found.folder}/{file}") is None}
    return replace(found, files=outside)


def run_directory(file: str) -> Path | None:
    """The run or sweep directory that a file, or what it is a link to, lies in, if there is one."""
    for folder in (*Path(os.path.abspath(file)).parents, *Path(file).resolve().parents):
        if (folder / "config.yaml").exists() and ((folder / "ckpt").exists() or (folder / "status.json").exists()):
            return folder
        if any((folder / name).exists() for name in FOLDERS):
            return folder
    return None


def import_plugin(name: str, found: Found) -> None:
    """Run its module. Raises: ConfigError for whatever it raises, sys.exit() included."""
    if found.local:
        loaded = {file: sha256 for one in LOADED.values() for file, sha256 in one.paths().items()}
        changed = [file for file, sha256 in found.paths().items() if loaded.get(file, sha256) != sha256]
        require(not changed, f"{', '.join(changed)} has changed since it was imported: start Python again")
        FINDER.add(found)
    importlib.invalidate_caches()  # the file may be younger than what was found in its folder before
    try:
        importlib.import_module(name)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ConfigError(f"plugins=[{name}] cannot be imported: {one_line(error)}") from error
    LOADED[name] = found


def plugin_hashes(names: Iterable[str]) -> dict[str, str]:
    """What a run records of each loaded plugin: the SHA-256 of its file, of several files that of their list."""
    loaded = {name: LOADED[name] for name in names if name in LOADED}
    return {name: one.sha256 if len(one.files) > 1 else one.files[one.main] for name, one in loaded.items()}


def joined_versions(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Two records of plugin_hashes() as one: "SHA256, SHA256" where a file has changed between them."""
    both = {name: [*before.get(name, "").split(", "), now.get(name, "")] for name in {**before, **now}}
    return {name: ", ".join(filter(None, dict.fromkeys(versions))) for name, versions in both.items()}


def changed_plugins(recorded: Mapping[str, str]) -> list[str]:
    """What there is to say of the loaded plugins whose files are not those that a run has recorded."""
    here = plugin_hashes(recorded)
    earlier = {name: LOADED[name].files[LOADED[name].main] for name in here}  # recorded of any plugin by old versions
    return [
        f"the plugin {name} has changed: its SHA-256 is {here.get(name, 'unknown')[:12]}, the run's "
        + ", ".join(version[:12] for version in str(sha256).split(", "))
        for name, sha256 in recorded.items()
        if sha256 not in (here.get(name), earlier.get(name))
    ]


# -----------------------------------------------------------------------------
# What the user has agreed to


def in_environment() -> dict[str, str]:
    """Plugins of $NANOQK_PLUGINS -> Found.sha256 in the process that hands them on, "" where the user names them."""
    words = (word.strip().partition("=") for word in os.environ.get(ENVIRONMENT, "").split(","))
    return {name: sha256 for name, _, sha256 in words if name}


def handed_on() -> dict[str, str]:
    """The environment that hands the plugins of this process on to those that it starts."""
    named = in_environment() | {name: found.sha256 for name, found in LOADED.items()}
    return {ENVIRONMENT: ",".join(f"{name}={sha256}" for name, sha256 in named.items())} if named else {}


def trained_with(name: str) -> list[dict[str, str]]:
    """The files of a plugin, by module, with which the user has trained."""
    found = read_json(config_folder() / TRAINED).get(name)
    return [files for files in found if isinstance(files, dict)] if isinstance(found, list) else []


def remember(names: Iterable[str]) -> str:
    """Note that the user trains with these plugins, as far as the user has named them: runs may name them from now on.
    Returns a warning, "" for none."""
    new = [name for name in names if name in NAMED and LOADED[name].files not in trained_with(name)]
    file = config_folder() / TRAINED
    try:
        if new:
            with FileLock(file.with_suffix(".lock"), timeout=10):
                write_json(file, read_json(file) | {name: [*trained_with(name), LOADED[name].files] for name in new})
    except OSError as error:
        return f"{file} cannot be written ({error.strerror}): sample.py will need plugins=[{','.join(new)}]"
    return ""
