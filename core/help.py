"""--help, from the declarations of the settings."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import get_args

from core.schema import REQUIRED, Setting, Variants, declared, show

Presets = Mapping[str, Mapping[str, str]]  # group -> option -> help


def help_text(doc: str | None, cls: type, presets: Presets | None = None) -> str:
    """What a program does, then a line for each of its settings and each option of its groups."""
    return "\n".join([(doc or "").strip(), "", "Settings, written key=value:", *describe(cls, presets or {})])


def describe(cls: type, presets: Presets) -> Iterator[str]:
    groups = []
    for name, setting in declared(cls).items():
        if setting.options or is_dataclass(setting.kind):
            groups.append((name, setting))
        else:
            yield line(name, setting)
    for name in [name for name in presets if name not in declared(cls)]:
        yield f"\n{name}=NAME: a file of configs/{name}/"
        yield from choices(presets[name])
    for name, setting in groups:
        yield f"\n{name}: {setting.help}"
        if name in presets:
            yield from choices(presets[name], setting.default.name)
        yield from describe_options(name, setting)


def describe_options(group: str, setting: Setting) -> Iterator[str]:
    """The options of a group with the settings of each; one that is as in an option before is not repeated."""
    seen: set[str] = set()
    variants = setting.one(Variants)
    for option, cls in (setting.options or {"": setting.kind}).items():
        inner = {key: one for key, one in declared(cls).items() if key != "name" or one.help}
        lines = {key: line(f"{group}.{key}", one, 4 if option else 2) for key, one in inner.items()}
        known = [key for key, text in lines.items() if text in seen]
        seen |= {*lines.values()}
        if option:
            said = (variants and variants.says.get(option)) or " ".join((cls.__doc__ or "").split())
            also = f"; also {', '.join(known)}" if known else ""
            yield from choices({option: said + also}, setting.default.name, group)
        yield from (text for key, text in lines.items() if key not in known)


def choices(options: Mapping[str, str], default: str | None = None, group: str = "") -> Iterator[str]:
    for option, text in options.items():
        word, mark = f"{group}={option}" if group else option, " (the default)" if option == default else ""
        yield f"  {word:36s} {text}{mark}".replace("\n", f"\n{'':39s}").rstrip()


def line(key: str, setting: Setting, indent: int = 2) -> str:
    key, default = key.rstrip("_"), setting.default
    value = json.dumps(default)[1:-1] if isinstance(default, str) else show(default)
    # the words of a Literal, alone or in a union
    words = [word for part in get_args(setting.kind) for word in get_args(part) or [part] if isinstance(word, str)]
    allowed = "" if all(word in setting.help for word in words) else f"{', '.join(words)}: "
    if default == REQUIRED:
        value, allowed = "", "must be given: "
    return f"{' ' * indent}{f'{key}={value}':{38 - indent}s} {allowed}{setting.help}".rstrip()
