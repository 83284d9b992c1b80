"""How settings are declared, checked and explained. Knows no setting."""

import dataclasses
import difflib
import functools
import hashlib
import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any


class ConfigError(ValueError):
    """A setting that cannot be used. The message is one line: key, value, rule. Programs exit with status 2."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def at_least(key: str, value: int, least: int) -> None:
    require(least <= value < 2**31, f"{key}={value} must be >= {least} and < 2**31")


def one_of(key: str, value: str, allowed: tuple[str, ...], otherwise: str = "") -> None:
    require(value in allowed, f"{key}={value} must be one of {', '.join(allowed)} {otherwise}".rstrip())


def build(cls: type, source: Any, prefix: str = "") -> Any:
    """An instance of the dataclass `cls` from a mapping, with exact types and no unknown key."""
    name = prefix.rstrip(".") or "the config"
    require(isinstance(source, Mapping), f"{name}={show(source)} must be a group of settings")
    hints = type_hints(cls)
    known = {f.name: f for f in fields(cls)}
    for key, value in source.items():
        if key not in known:
            raise ConfigError(f"{prefix}{key}={show(value)} is unknown{did_you_mean(str(key), known, prefix)}")
    values = {}
    for key, spec in known.items():
        if key not in source:
            continue
        value = source[key]
        require(value != "???", f"{prefix}{key} must be given")
        if "variants" in spec.metadata:
            variants = spec.metadata["variants"]
            variant = value.get("name") if isinstance(value, Mapping) else value
            known_name = isinstance(variant, str) and variant in variants
            require(known_name, f"{prefix}{key}.name={show(variant)} must be one of {', '.join(variants)}")
            values[key] = build(variants[variant], value, f"{prefix}{key}.")
        elif dataclasses.is_dataclass(hints[key]):
            values[key] = build(typing.cast(type, hints[key]), value, f"{prefix}{key}.")
        else:
            values[key] = convert(value, hints[key], prefix + key)
    return cls(**values)


type_hints = functools.cache(typing.get_type_hints)  # of a dataclass: name -> type


TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a group",
    type(None): "null",
}


def convert(value: Any, hint: Any, key: str) -> Any:
    """`value` as the type `hint`: exact, but for an integer where a float is asked for."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if typing.get_origin(option) is tuple:
            items = typing.get_args(option)
            if isinstance(value, list | tuple) and len(value) == len(items):
                return tuple(convert(v, t, key) for v, t in zip(value, items, strict=True))
        elif type(value) is option or (option is type(None) and value is None):
            return value
        elif option is float and type(value) is int:
            return float(value)
    if value != value:
        raise ConfigError(f"{key}=nan must be a number")
    wanted = [TYPE_NAMES.get(o) or f"a list of {len(typing.get_args(o))} numbers" for o in options]
    raise ConfigError(f"{key}={show(value)} must be {' or '.join(wanted)}")


def show(value: Any) -> str:
    return {True: "true", False: "false", None: "null"}[value] if isinstance(value, bool | None) else str(value)


def word(key: str, value: str) -> str:
    """key=value for a command line: in quotes where Hydra would take something in the value for syntax."""
    quoted = value.replace("'", "\\'")
    return f"{key}={value}" if re.fullmatch(r"[A-Za-z0-9_./:@%+~ -]+", value) else f"{key}='{quoted}'"


def did_you_mean(key: str, known: typing.Iterable[str], prefix: str = "") -> str:
    known = list(known)
    close = difflib.get_close_matches(key, known, 1, cutoff=0.5)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    return f"; known here: {', '.join(prefix + k for k in known)}" if known else ""


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
