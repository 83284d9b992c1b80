"""A command line becomes settings: by Hydra's composition, or as plain key=value; its errors in one line."""

import contextlib
import itertools
import keyword
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin

from core.files import MOST_DIGITS, ROOT, load_yaml
from core.help import Presets, help_text
from core.process import guarded, interrupt_kept
from core.schema import (
    ConfigError,
    Loads,
    Setting,
    convert,
    declared,
    did_you_mean,
    flatten,
    must_be_one_of,
    require,
    settings_of,
    show,
)

CONFIG_DIR = ROOT / "configs"

# -----------------------------------------------------------------------------
# Hydra programs


def run_app(schema: type, program: Callable[[Any], int], doc: str | None) -> None:
    """Exit with the status of `program(settings)`; Hydra composes the settings, a `schema`, from the command line. What
    is wrong with them ends as one line on standard error and status 2. With -m it reads every combination of values,
    then runs each in turn, and exits with the highest status."""
    argv = sys.argv[1:]
    if {"-h", "--help"} & set(argv):
        sys.exit(guarded(lambda: print_help(doc, schema, argv, presets(schema))))
    multirun = {"-m", "--multirun"}
    overrides = [word for word in argv if word not in multirun]

    def read(overrides: list[str]) -> Any:
        return settings_of(schema, compose(schema, overrides))

    def run_each() -> int:
        chosen, status = [read(combination) for combination in combinations(overrides)], 0
        folders = [one.out_dir for one in chosen if one.out_dir is not None]
        twice = next((name for name in folders if folders.count(name) > 1), None)
        require(twice is None, f"out_dir={twice} holds one run, not several: give none")
        for settings in chosen:
            status = max(status, guarded(partial(program, settings)))
            if status > 128:  # a signal
                break
        return status

    sys.exit(guarded(run_each if multirun & set(argv) else lambda: program(read(overrides))))


def print_help(doc: str | None, settings: type, argv: list[str], presets: Presets) -> int:
    """Print the help, with the options of the plugins that are named beside --help."""
    if any("=" in word for word in argv):
        load_early(settings, argv)
    print(help_text(doc, settings, presets))
    return 0


def combinations(overrides: list[str]) -> list[list[str]]:
    """The overrides of each run of a multirun. Raises: ConfigError."""
    choices = []
    for word in overrides:
        try:
            parsed = parse(word)
        except ConfigError:  # compose() takes it as text, or refuses it
            choices.append([word])
            continue
        try:
            values = [*parsed.sweep_string_iterator()] if parsed.is_discrete_sweep() else []
        except Exception as error:  # Hydra's of glob(), Python's of range(1,3,0)
            raise ConfigError(f"{word} is no list of values: {error}") from error
        choices.append([f"{parsed.get_key_element()}={value}" for value in values] or [word])
    return [[*combination] for combination in itertools.product(*choices)]


def parse(word: str) -> Any:
    """An override as Hydra reads it. Raises: ConfigError where it is not key=value."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    plain = word.lstrip("-~")
    if word.startswith("~") or (word.startswith("-") and "=" in word):
        raise ConfigError(f"{word} is not a setting: write {plain if '=' in plain else plain + '=...'}")
    known = plain == word and "=" in word[1:]
    require(known, f"{word} is unknown: settings are written key=value, and --help lists them")
    try:
        return OverridesParser.create().parse_override(word)
    except ValueError as error:  # an integer of more than 4,300 digits
        raise ConfigError(f"{word} must have at most {MOST_DIGITS} digits") from error
    except HydraException as error:
        reason = f"{str(error).split('See https')[0]}; quote what is not plain text, as in 'key=\"...\"'"
        raise ConfigError(f"{word} is not key=value: {reason}") from error


def as_hydra_takes(word: str, kinds: Mapping[str, list[Any]]) -> str:
    """The override; where its setting takes text alone, and Hydra reads neither text nor null, with a quoted value."""
    from hydra.core.override_parser.types import Quote, QuotedString

    key, _, value = word.partition("=")
    if any(kind not in (str, str | None) for kind in kinds.get(key.lstrip("+"), [None])):
        return word
    with contextlib.suppress(ConfigError):
        if isinstance(parse(word).value(), str | None):
            return word
    quoted = QuotedString(value, Quote.double).with_quotes()
    return f"{key}=" + re.sub(r"(\\*)\$\{", r"\1\1\\${", quoted)  # \${ is no interpolation


def compose(schema: type, overrides: list[str]) -> dict[str, Any]:
    """What Hydra composes from the overrides, as a nested dict. Raises: ConfigError."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for word, after in itertools.pairwise([*overrides, ""]):
        if word.startswith("--") or ("=" not in word and word.endswith(".py")):
            better = hint(word, schema, "" if "=" in after else after)
            require(better is None, f"{word} is unknown: write {better}")
    load_early(schema, overrides)
    kinds = every_setting(schema)
    words = [as_hydra_takes(word, kinds) for word in overrides]
    parsed = [parse(word) for word in words]
    for word in overrides:
        require(not word.lstrip("+").startswith("hydra"), f"{word} has no effect: Hydra composes the settings, no more")
    with interrupt_kept():
        register_with_hydra(schema, {override.key_or_group: override.value() for override in parsed})
    options = options_of(schema)
    without_setting = preset_files(schema).keys() - declared(schema).keys()  # as experiment
    for override in parsed:
        group, _, key = override.key_or_group.rpartition(".")
        word, value = override.input_line, override.value()
        named = key == "name" and value in options.get(group, [])
        same = f"write {group}={value}"
        require(not override.is_sweep_override(), f"{word} has several values: a list is [a,b], and -m trains each")
        none = value == {} or (value == [] and override.key_or_group in options)
        require(not none, f"{word} has no effect: name an option, or a setting of the group")
        require(not named, f"{word} keeps the old option's settings: {same}")
        file = CONFIG_DIR / override.key_or_group / f"{value}.yaml"
        local = override.key_or_group in without_setting and file.is_file() and not is_global(file)
        require(not local, f"{word}: the first line of {file} must be # @package _global_")
    try:
        with interrupt_kept(), hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            nested: Any = OmegaConf.to_container(hydra.compose(schema.__name__, words), resolve=True)
    except (HydraException, OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(explain(error, schema, overrides)) from error
    load_asked(schema, nested)
    return {str(key): value for key, value in nested.items()}


def load_early(schema: type, overrides: list[str]) -> None:
    """Import the plugins that the command line names, else those of the chosen presets' files: Hydra must know their
    options before it composes."""
    given: dict[str, Any] = {}
    for word in overrides:
        with contextlib.suppress(ConfigError):  # beside --help anything may stand
            parsed = parse(word)
            given[parsed.key_or_group] = parsed.value()
    presets = [CONFIG_DIR / group / f"{given[group]}.yaml" for group in preset_files(schema) if group in given]
    contents = []
    for file in presets:
        with contextlib.suppress(OSError, UnicodeDecodeError):  # Hydra says what is wrong with it
            content = parse_yaml(file.read_text(encoding="utf-8"), str(file))
            contents += [content] if isinstance(content, dict) else []
    for content in (given, *({key: content[key] for key in content if key not in given} for content in contents)):
        load_asked(schema, content)


def load_asked(schema: type, content: Mapping[str, Any]) -> None:
    """Import the plugins that these settings name, which come from the command line or from a preset's file."""
    for key, setting in declared(schema).items():
        for loads in setting.all(Loads) if key in content else ():
            loads.asked(convert(content[key], setting.kind, key))


def register_with_hydra(schema: type, given: Mapping[str, Any]) -> None:
    """Tell Hydra the defaults and the options of every group, so that YAML files hold presets alone. given: what the
    command line names, with its values.

    configs/GROUP/NAME.yaml is a preset; configs/GROUP/OPTION/MODEL.yaml holds the values of an option for model=MODEL.
    What schema.begun_with() has of a group stands for its defaults, and for the preset of model=. A group whose option
    nothing chooses is no group for Hydra, which takes a hundredth of a second for each.
    """
    from hydra.core.config_store import ConfigStore

    store, known = ConfigStore.instance(), declared(schema)
    begun = schema.begun_with(given) if hasattr(schema, "begun_with") else {}
    files = preset_files(schema)
    named = [CONFIG_DIR / group / f"{given[group]}.yaml" for group in files if group in given]
    any_may_be_chosen = any(file.is_file() and is_global(file) for file in named)
    chosen: dict[str, str | None] = {}
    settled: dict[str, Any] = {}
    for group, setting in known.items():
        values = begun.get(group, {})
        default = values.get("name", setting.default.name) if setting.options else None
        may_be_chosen = any_may_be_chosen or group in given or group in files
        for option, cls in setting.options.items():
            if not may_be_chosen and option != default:
                continue
            node = asdict(cls(name=option))
            if values.keys() <= node.keys() and values.get("name", option) == option:
                node |= values
            if (CONFIG_DIR / group / option).is_dir() and ("model" in given or not begun):
                node["defaults"] = ["_self_", {f"optional {option}@_here_": "${model}"}]
            if may_be_chosen:
                store.store(name=option, group=group, node=node)
                chosen[group] = default
            else:
                settled[group] = node
    rest = {key: begun.get(key, value) for key, value in asdict(schema()).items() if key not in chosen} | settled
    # presets last: they may choose the option of another group
    for group in files:
        chosen[group] = known[group].default.name if group in known and group not in begun else chosen.get(group)
    defaults = ["_self_", *({group: option} for group, option in chosen.items())]
    store.store(name=schema.__name__, node={"defaults": defaults, **rest})


def preset_files(schema: type) -> dict[str, list[Path]]:
    """The YAML files of each group that has any; groups that are no setting, as experiment, come last."""
    files: dict[str, list[Path]] = {}
    for file in sorted(CONFIG_DIR.glob("*/*.yaml")):
        if file.parent.name not in getattr(schema, "elsewhere", {}):  # another program takes these
            files.setdefault(file.parent.name, []).append(file)
    return {group: files[group] for group in dict.fromkeys([*declared(schema), *files]) if group in files}


def is_global(file: Path) -> bool:
    """Whether a preset's file has whole settings, not those of its group: Hydra looks at the first lines alone."""
    return re.match(rb"\s*#\s*@package\s+_global_\s", file.read_bytes()) is not None


def presets(schema: type) -> dict[str, dict[str, str]]:
    """The YAML files of each group with their help."""
    found = preset_files(schema).items()
    return {group: {file.stem: preset_help(group, file) for file in files} for group, files in found}


def preset_help(group: str, file: Path) -> str:
    """The comment at the top of a preset's file, and what it sets beside its own group."""
    text = file.read_text(encoding="utf-8")
    comments = [line[1:].strip() for line in text.splitlines() if line.startswith("#")]
    said = " ".join(comment for comment in comments if not comment.startswith("@"))
    content = parse_yaml(text, str(file)) or {}
    if not is_global(file):
        return said
    chosen = [one for one in content.pop("defaults", []) if isinstance(one, dict)]
    also = {key.split("/")[-1]: value for one in chosen for key, value in one.items()}
    also |= flatten({key: value for key, value in content.items() if key != group})
    return f"{said}\nalso sets {' '.join(f'{key}={show(value)}' for key, value in also.items())}" if also else said


def options_of(schema: type) -> dict[str, list[str]]:
    """The options of every group."""
    named = {group: {*setting.options} for group, setting in declared(schema).items() if setting.options}
    for group, files in preset_files(schema).items():
        named.setdefault(group, set()).update(file.stem for file in files)
    return {group: sorted(options) for group, options in named.items()}


def every_setting(schema: type) -> dict[str, list[Any]]:
    """The settings of all options of all groups, by their full name; the type that each option gives them."""
    found: dict[str, list[Any]] = {}
    for name, setting in declared(schema).items():
        found[name] = [setting.kind]
        for cls in setting.options.values() or ([setting.kind] if is_dataclass(setting.kind) else []):
            for leaf, inner in declared(cls).items():
                found.setdefault(f"{name}.{leaf}", []).append(inner.kind)
    return found


def explain(error: BaseException, schema: type, overrides: list[str]) -> str:
    """One line for an error of Hydra's: the override that caused it and the rule."""
    text = str(error)
    unknown = re.search(r"Could not override '([^']+)'", text) or re.search(r"Key '([^']+)' is not in struct", text)
    if unknown:
        override = next((o for o in overrides if o.lstrip("+~").split("=")[0] == unknown[1]), unknown[1])
        return f"{override} {unknown_key(unknown[1], schema, overrides, override)}"
    for override in overrides:
        group, _, option = override.lstrip("+").partition("=")
        known = options_of(schema).get(group, [option])
        if option not in known:
            told = must_be_one_of(option, known, f"{group}=")
            if group in declared(schema) and hasattr(declared(schema)[group].default, "slot"):
                named = any("plugins=" in word for word in overrides)
                told += "; the plugins register no such option" if named else "; one of yours needs plugins=[MODULE]"
            return f"{override} {told}"
    return text


def unknown_key(key: str, schema: type, overrides: list[str], word: str) -> str:
    """What there is to say of a key that no chosen option has. word: the override, key=value."""
    program = getattr(schema, "elsewhere", {}).get(key.split(".")[0])
    if program is not None:
        return f"is an override for {program}"
    group, _, leaf = key.rpartition(".")
    settings = every_setting(schema)
    options = declared(schema)[group].options if group in declared(schema) else {}
    owners = [option for option, cls in options.items() if leaf in declared(cls)]
    if owners:
        return f"is unknown: {leaf} belongs to {' and '.join(f'{group}={option}' for option in owners)}"
    if (better := hint(word, schema)) is not None:
        return f"is unknown; did you mean {better}?"
    chosen = dict(o.lstrip("+").partition("=")[::2] for o in overrides).get(group, "")
    if chosen in options:
        return f"is unknown{did_you_mean(leaf, declared(options[chosen]), group + '.')}"
    return f"is unknown{did_you_mean(key, [k for k in settings if k.rpartition('.')[0] == group])}"


def hint(word: str, schema: type, after: str = "") -> str | None:
    """What to write for a word that another program takes: n_layer=4, --n-layer 4, config/train_gpt2.py, or a key that
    is in another group; None for others. after: the next word."""
    key, equals, value = word.lstrip("-+").partition("=")
    value = value if equals else after or "..."
    key = key if key.endswith(".py") else key.rpartition(".")[2].replace("-", "_")
    table = getattr(schema, "foreign", {})
    for wanted in (f"{key}={value.lower()}", key, Path(key).suffix):
        if wanted in table:
            return str(table[wanted]).format(value)
    name = next((name for name in every_setting(schema) if name.rpartition(".")[2] == key), None)
    return None if name is None else f"{name}={value}"


# -----------------------------------------------------------------------------
# key=value scripts


def run_script(
    settings: type, program: Callable[..., int], doc: str | None, argv: list[str] | None = None, passes_on: bool = False
) -> int:
    """The exit status of program(settings), with the key=value arguments of the command line; --help prints `doc` and
    the settings. passes_on: arguments with an unknown key are no error, but a list, the program's second argument."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        return guarded(lambda: print_help(doc, settings, [], {}))

    def run() -> int:
        chosen, others = read_arguments(settings, argv, passes_on)
        return program(chosen, others) if passes_on else program(chosen)

    return guarded(run)


def read_arguments(settings: type, argv: list[str], passes_on: bool = False) -> tuple[Any, list[str]]:
    """The checked settings of key=value arguments, and those with an unknown key, which only passes_on allows."""
    values, others = read_settings(argv, settings)
    for word in others:
        key, equals, _ = word.partition("=")
        good = bool(equals) and (passes_on or key[:1].isalpha())
        plain, known = word.lstrip("-"), declared(settings)
        better = f"{next(iter(known))}={word}" if plain == word and "/" in word and not equals else plain
        better = f", as {better}" if better.partition("=")[0] in known and better != word else ""
        require(good, f"{word} is unknown: settings are written key=value{better}")
    if others and not passes_on:
        key = others[0].partition("=")[0]
        raise ConfigError(f"{others[0]} is unknown{did_you_mean(key, declared(settings))}")
    chosen: Any = settings_of(settings, values)
    return chosen, others


def read_settings(argv: list[str], settings: type) -> tuple[dict[str, Any], list[str]]:
    """The arguments of a settings class, as a mapping for build(), and the other arguments. Text needs no quotes."""
    known, others = declared(settings), []
    values: dict[str, Any] = {}
    groups: dict[str, dict[str, str]] = {}
    for word in argv:
        key, equals, text = word.partition("=")
        key = f"{key}_" if keyword.iskeyword(key) else key  # the name of a field, as in from=
        group, dot, leaf = key.partition(".")
        if not equals or group not in known or (dot and not known[group].options):
            others.append(word)
        elif known[group].options:
            groups.setdefault(group, {})[leaf or "name"] = text
        else:
            values[key] = read_value(key, text, known[key])
    for group, given in groups.items():
        name, options = given.get("name", known[group].default.name), known[group].options
        require(name in options, f"{group}={name} {must_be_one_of(name, options, f'{group}=')}")
        inner = declared(options[name])
        values[group] = {"name": name, **{k: read_value(f"{group}.{k}", v, inner.get(k)) for k, v in given.items()}}
    return values, others


def read_value(key: str, text: str, setting: Setting | None) -> Any:
    """The text itself where the setting takes text, and null where it takes null; else what it is as YAML."""
    kind = None if setting is None else setting.kind
    kinds = (kind,) if get_origin(kind) is tuple else (kind, *get_args(kind))  # tuple[str, ...] is a list, no text
    if str in kinds and not (text == "null" and type(None) in kinds):
        return text
    if int in kinds and re.fullmatch(r"[-+]?[\d:_]+", text):  # to YAML 010 is 8, and 1:30 is 90
        plain = re.fullmatch(r"[-+]?\d+(_\d+)*", text) is not None and len(text) <= MOST_DIGITS
        require(plain, f"{key}={text} must be an integer of at most {MOST_DIGITS} digits")
        return int(text)
    return parse_yaml(text, f"{key}={text} is not key=value")


def parse_yaml(text: str, where: str) -> Any:
    """The content of YAML, with Hydra's numbers. Raises: ConfigError that begins with `where`."""
    import yaml

    try:
        return load_yaml(text, exponents=True)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error
