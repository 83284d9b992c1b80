"""How settings are declared, converted, checked and explained. Knows no setting.

A settings class is a frozen dataclass; a field says once what there is to know of a setting:

    @options
    class GQAOptions(MHAOptions):
        "Grouped-query attention"
        name: str = "gqa"
        n_kv_head: Annotated[int, AtLeast(1), Help("key and value heads")] = 2

`Literal[...]` lists the allowed words. Rules of several settings together stand in the class's method `check`.
A field whose type is a settings class is a group; with Variants(table), or where that class has a `slot`, the group is
one of several classes, by name.
"""

import dataclasses
import difflib
import functools
import hashlib
import json
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal, TypeVar

from core.files import ANYWHERE, MOST_DIGITS, expand, open_regular

T = TypeVar("T")
REQUIRED = "???"  # OmegaConf's mark of a value that must be given


class ConfigError(ValueError):
    """A setting that cannot be used. The message is one line: key, value, rule. Programs exit with status 2."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def one_line(error: BaseException, length: int = 300) -> str:
    """Kind and message of an error, cut off after `length` characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:length]


# -----------------------------------------------------------------------------
# Declaring a setting


@typing.dataclass_transform(frozen_default=True)
def options(cls: type[T]) -> type[T]:
    """A class of settings: a frozen dataclass."""
    return dataclass(frozen=True)(cls)


@dataclass(frozen=True)
class Help:
    text: str


@dataclass(frozen=True)
class Rule:
    """says: the end of the error line, after key=value. None is exempt where the type allows it."""

    holds: Callable[[Any], bool]
    says: str


@dataclass(frozen=True)
class BeforeItExisted:
    """The setting came after runs had been named. Those runs had `value`, which does not enter names and hashes."""

    value: Any


@dataclass(frozen=True)
class DefaultWas:
    """The default before the one of today. What was begun with it goes on where it is named."""

    value: Any


@dataclass(frozen=True)
class Variants:
    """The classes that a group can be, by name; `says` has the help of each where its docstring does not."""

    table: Mapping[str, type]
    says: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Loads:
    """Called with the setting's value before settings without this note are converted: `asked` where a command, or a
    file that it names, has the value, else `stored`."""

    stored: Callable[[Any], None]
    asked: Callable[[Any], None]


FREE = object()  # the setting is not part of what a run is: it may change when the run is resumed


def AtLeast(least: int, bits: int = 31) -> Rule:
    return Rule(lambda value: least <= value < 2**bits, f"must be >= {least} and < 2**{bits}")


def Between(low: float, high: float, ends: str = "[]") -> Rule:
    def holds(value: float) -> bool:
        return low <= value <= high and (value > low or ends[0] == "[") and (value < high or ends[1] == "]")

    return Rule(holds, f"must be in {ends[0]}{low}, {high}{ends[1]}")


LARGEST = 1e30  # of a number: fp32 holds it
POSITIVE = Rule(lambda value: 0 < value <= LARGEST, f"must be > 0 and at most {LARGEST:g}")
NOT_NEGATIVE = Rule(lambda value: 0 <= value <= LARGEST, f"must be >= 0 and at most {LARGEST:g}")
NOT_EMPTY = Rule(lambda value: value != "", "must not be empty")


def Writable(mark: bytes) -> Rule:
    """A file that a program writes. What it replaces is empty, or has `mark` in its first KiB, as such a file has."""

    def holds(name: str) -> bool:
        file = expand(name)
        if not os.access(file.parent, os.W_OK):
            return False
        try:
            with open_regular(file, within=ANYWHERE) as old:
                return (start := old.read(1024)) == b"" or mark in start
        except OSError as error:
            return isinstance(error, FileNotFoundError) and file.parent.is_dir()

    return Rule(holds, "must be a file in a folder that can be written: a new one, or one that this program wrote")


@dataclass(frozen=True)
class Setting:
    """A field of a settings class: its type, its default, and the notes of its Annotated type."""

    kind: Any
    default: Any
    notes: tuple[Any, ...]

    def all(self, note: type[T]) -> list[T]:
        return [one for one in self.notes if isinstance(one, note)]

    def one(self, note: type[T]) -> T | None:
        return next((one for one in self.notes if isinstance(one, note)), None)

    @property
    def help(self) -> str:
        return next((help.text for help in self.all(Help)), "")

    @property
    def options(self) -> Mapping[str, type]:
        """The classes of a group, by name; {} for another setting."""
        variants = self.one(Variants)
        if variants is not None:
            return variants.table
        return self.kind.slot.options if hasattr(self.kind, "slot") else {}


@functools.cache
def _declared(cls: Any) -> dict[str, Setting]:
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        annotated = typing.get_origin(hint) is typing.Annotated
        kind, *notes = typing.get_args(hint) if annotated else [hint]
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        found[field.name] = Setting(kind, default, tuple(notes))
    return found


# The settings of a class, by name. A cached function wants Hashable arguments, which a class is not to mypy.
declared: Callable[[Any], dict[str, Setting]] = _declared


# -----------------------------------------------------------------------------
# From a mapping to checked settings


def settings_of(cls: type[T], source: Mapping[str, Any], prefix: str = "") -> T:
    """A checked instance of the settings class `cls`. Raises: ConfigError naming key, value and rule."""
    settings: T = build(cls, source, prefix)
    validate(settings, prefix)
    return settings


def build(cls: type, source: Any, prefix: str = "", reads: bool = False) -> Any:
    """An instance of the settings class `cls` from a mapping, with exact types and no unknown key; rules are not
    checked. reads: nothing is imported, and an unknown variant of a slot is as it was stored."""
    name = prefix.rstrip(".") or "the config"
    known = declared(cls)
    if not isinstance(source, Mapping):
        raise ConfigError(f"{name}={show(source)} must be a group of settings: write {prefix}{next(iter(known))}=...")
    for key, value in source.items():
        if key not in known:
            raise ConfigError(f"{prefix}{key}={show(value)} is unknown{did_you_mean(str(key), known, prefix)}")
    values = {}
    for key in sorted((key for key in known if key in source), key=lambda key: not known[key].all(Loads)):
        value, kind, variants = source[key], known[key].kind, known[key].options
        if variants:
            value = value if isinstance(value, Mapping) else {"name": value}
            chosen: Any = value.get("name")
            good = isinstance(chosen, str) and chosen in variants
            if reads and isinstance(chosen, str) and not good and hasattr(kind, "slot"):
                values[key] = as_stored(kind, value, f"{prefix}{key}.")
                continue
            if not good:
                raise ConfigError(f"{prefix}{key}.name={show(chosen)} must be one of {', '.join(variants)}")
            kind = variants[chosen]
            for leaf in [leaf for leaf in value if leaf not in declared(kind)]:
                owners = [option for option, cls in variants.items() if leaf in declared(cls)]
                if owners:
                    where = " and ".join(f"{prefix}{key}={option}" for option in owners)
                    raise ConfigError(f"{prefix}{key}.{leaf}={show(value[leaf])} is unknown: {leaf} belongs to {where}")
        group = is_dataclass(kind)
        values[key] = build(kind, value, f"{prefix}{key}.", reads) if group else convert(value, kind, prefix + key)
        for note in known[key].all(Loads) if not reads else ():
            note.stored(values[key])
    return cls(**values)


def as_stored(base: type, values: Mapping[str, Any], prefix: str) -> Any:
    """Options of a variant that this process does not know. Raises: ConfigError where a key cannot be a setting's."""
    try:
        for key in values:
            require(key in declared(base) or not hasattr(base, key), f"{prefix}{key}={show(values[key])} is unknown")
        return stored_class(base, tuple((key, type(value)) for key, value in values.items()))(**values)
    except TypeError as error:
        raise ConfigError(f"{prefix.rstrip('.')}={show(values)} cannot be settings: {error}") from error


@functools.cache
def stored_class(base: type, fields: tuple[tuple[str, type], ...]) -> Any:
    return dataclasses.make_dataclass("Stored", fields, bases=(base,), frozen=True, kw_only=True)


TYPE_NAMES: dict[Any, list[str]] = {
    int: ["an integer"], float: ["a number"], bool: ["true", "false"], str: ["text"], list: ["a list"],
    dict: ["a group, {name: value}, with text as names"], type(None): ["null"],
}  # fmt: skip


def convert(value: Any, hint: Any, key: str) -> Any:
    """`value` as the type `hint`: exact, but for an integer where a float is asked for and a list where a tuple is."""
    if isinstance(value, str):
        if value == REQUIRED:
            raise ConfigError(f"{key.removesuffix('_')}= must be given")  # as from=, whose field is from_
        good = value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)
        if not good:  # what Python makes of other bytes
            raise ConfigError(f"{key}={value!a} must be Unicode text")
    if isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
        raise ConfigError(f"{key}={show(value)} must have at most {MOST_DIGITS} digits")
    if type(value) is hint and hint is not dict:
        return value
    allowed: list[str] = []
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for option in typing.get_args(hint) if union else (hint,):
        kind, inner = typing.get_origin(option) or option, typing.get_args(option)
        if kind is Literal:
            if isinstance(value, str) and value in inner:
                return value
            allowed += inner
        elif kind is tuple:
            many = inner[-1:] == (...,)
            if isinstance(value, list | tuple) and (many or len(value) == len(inner)):
                return tuple(convert(v, inner[0] if many else inner[i], key) for i, v in enumerate(value))
            one = value if isinstance(value, str) and value.isidentifier() else "a,b"
            example = f"[{one}]" if inner[0] is str else "[1,2]"
            allowed.append(f"a list, as {example}" if many else f"a list of {len(inner)} numbers")
        elif type(value) is kind and (kind is not dict or all(isinstance(name, str) for name in value)):
            return value
        elif kind is float and type(value) is int and abs(value) <= sys.float_info.max:
            return float(value)
        else:
            allowed += TYPE_NAMES[kind]
    if typing.get_origin(hint) is Literal:
        raise ConfigError(f"{key}={show(value)} {must_be_one_of(show(value), allowed)}")
    words = " or ".join(filter(None, [", ".join(allowed[:-1]), allowed[-1]]))
    raise ConfigError(f"{key}={show(value)} must be {words}")


def validate(settings: Any, prefix: str = "") -> None:
    """Raise ConfigError for the first setting with a wrong type or against a rule of its own, then of its class."""
    for name, setting in declared(type(settings)).items():
        value, key = getattr(settings, name), prefix + name
        if is_dataclass(value):
            validate(value, f"{key}.")
            continue
        convert(value, setting.kind, key)
        for rule in setting.all(Rule):
            if value is not None and not rule.holds(value):
                raise ConfigError(f"{key}={show(value)} {rule.says}")
    if hasattr(type(settings), "check"):
        settings.check()


# -----------------------------------------------------------------------------
# What settings come to, in words and numbers


def deciding(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Flat {key: value} of the settings that decide the numbers: all but FREE ones, and those with the value that was
    in force before they existed."""
    flat: dict[str, Any] = {}
    for name, setting in declared(type(settings)).items():
        value, before = getattr(settings, name), setting.one(BeforeItExisted)
        if FREE in setting.notes or (before is not None and value == before.value):
            continue
        flat |= deciding(value, f"{prefix}{name}.") if is_dataclass(value) else flatten({prefix + name: value})
    return flat


def with_earlier_defaults(settings: Any, old: Any = None) -> tuple[Any, list[str]]:
    """A copy in which each setting at its default has the earlier one (DefaultWas), and the words that name these, as
    ["optim.beta=0.9"]. old: other settings; only what they have at the earlier default is changed."""
    changed, words = {}, []
    for name, setting in declared(type(settings)).items():
        value, was, before = getattr(settings, name), setting.one(DefaultWas), getattr(old, name, None)
        if was is not None and value == setting.default and (old is None or before == was.value):
            changed[name] = was.value
            words.append(f"{name}={show(was.value)}")
        elif is_dataclass(value):
            changed[name], of_group = with_earlier_defaults(value, before)
            words += [f"{name}.{word}" for word in of_group]
    return dataclasses.replace(settings, **changed), words


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


def digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def show(value: Any) -> str:
    """A value as a user writes it."""
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "null"}[value]
    try:
        return str(list(value) if isinstance(value, tuple) else value)
    except ValueError:  # more than 4,300 digits
        return "(a long integer)"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """ "key old -> new" for each key that differs, "group.key" in groups, "unset" where one of them lacks it."""
    before, after = ({key: show(value) for key, value in flatten(settings).items()} for settings in (old, new))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return [f"{key} {before.get(key, 'unset')} -> {after.get(key, 'unset')}" for key in keys]


def closest(key: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The one of `known` that is most like `key`, in any case; one that it begins with comes first."""
    lower = {name.lower(): name for name in known}
    begun = [name for name in lower if len(name) > 1 and key.lower().startswith(name)]
    close = sorted(begun, key=len)[-1:] or difflib.get_close_matches(key.lower(), lower, 1, cutoff)
    return lower[close[0]] if close else None


def must_be_one_of(word: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of an error line about a `word` that is not among `known`."""
    close = closest(word, known, 0.6)
    return f"must be one of {', '.join(known)}" + (f"; did you mean {prefix}{close}?" if close else "")


def did_you_mean(key: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of an error line about an unknown `key`."""
    known = list(known)
    if (close := closest(key, known)) is not None:
        return f"; did you mean {prefix}{close}?"
    return f"; known here: {', '.join(prefix + k for k in known)}" if known else ""
