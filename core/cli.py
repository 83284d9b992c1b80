"""A command line becomes a config: Hydra's composition, key=value scripts, exit statuses, one-line errors."""

import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from core.schema import ConfigError, build, convert, did_you_mean, flatten, require

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"


HYDRA_OPTIONS = {
    "-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "--resolve", "-p", "--package", "-r", "--run", "-m",
    "--multirun", "-sc", "--shell-completion", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir",
    "--experimental-rerun", "-i", "--info",
}  # fmt: skip


def run_app(config_name: str, schema: type, program: Callable[[Any], int]) -> None:
    """Run `program(config)`, config an instance of `schema`, as a Hydra application (overrides, -m, --cfg, --help).

    Exits with the program's status. Whatever is wrong with the settings ends as one line on standard error and status
    2. In a multirun the other runs go on, and the highest status is the last word.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra then raises, instead of printing and leaving with status 1
    import hydra
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    statuses = [0]

    def task(composed: DictConfig) -> None:
        try:
            config = build(schema, OmegaConf.to_container(composed, resolve=True))
            config.check()
            statuses.append(program(config))
            if statuses[-1] > 128:  # a signal stops a multirun too
                sys.exit(statuses[-1])
            sys.stdout.flush()
        except (ConfigError, OmegaConfBaseException) as error:
            statuses.append(refuse(str(error)))
        except BrokenPipeError:
            leave_output()
        except OSError as error:  # a full disk, say
            print(f"failed: {' '.join(str(error).split())}", file=sys.stderr)
            statuses.append(1)
        except Exception as error:
            if is_out_of_memory(error):
                said = " ".join(str(error).split())[:300]
                print(f"failed: out of memory ({said}); dry_run=true says what a run takes", file=sys.stderr)
            else:  # printed here: hydra would add its own lines to it
                traceback.print_exc()
            statuses.append(1)

    # hydra's parser takes no settings after an option that stands between them
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word in ("-m", "--multirun"))
    for word in sys.argv[1:]:
        if re.fullmatch(r"--?[A-Za-z][\w-]*", word) and word not in HYDRA_OPTIONS:
            sys.exit(refuse(f"{word} is unknown: settings are written key=value, and --help lists them"))
        if word.startswith("--") and "=" in word and not word.startswith("--config") or word.startswith("~"):
            plain = word.lstrip("-~")
            sys.exit(refuse(f"{word} is not a setting: write {plain if '=' in plain else plain + '=...'}"))
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=config_name)(task)()
    except KeyboardInterrupt:
        statuses.append(130)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        statuses.append(refuse(explain(error, schema, sys.argv[1:])))
    sys.exit(max(statuses))


def run_script(
    argv: list[str], doc: str | None, known: dict[str, Any], program: Callable[[dict[str, Any]], int]
) -> int:
    """Call program(values) with the values of key=value words, `known` as in read_words; --help prints `doc`.

    Returns the exit status: the program's, 2 for a word that cannot be used, 1 where a file cannot be written.
    """
    if {"-h", "--help"} & set(argv):
        print(doc)
        return 0
    try:
        values, others = read_words(argv, known)
        require(not others, f"{others[:1]} is unknown{did_you_mean(''.join(others[:1]), known)}")
        status = program(values)
        sys.stdout.flush()
        return status
    except ConfigError as error:
        return refuse(str(error))
    except BrokenPipeError:
        leave_output()
        return 0
    except OSError as error:  # a full disk, say
        print(f"failed: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def leave_output() -> None:
    """Whoever read our output has left, as head does: what else is printed goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def is_out_of_memory(error: Exception) -> bool:
    """PyTorch has a class of its own for a GPU's memory alone."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def parse_yaml(text: str, where: str) -> Any:
    """The content of YAML in which 1e-3 is a number, as it is to Hydra; PyYAML alone takes it for text.

    Raises: ConfigError that begins with `where`.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    exponent = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, list("-+0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error


def read_words(argv: list[str], known: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """key=value words: those of `known` (key -> type) with the types it asks for, and the others as they are."""
    values: dict[str, Any] = {}
    others = []
    for word in argv:
        key, equals, text = word.partition("=")
        if key in known and equals:
            value = text if known[key] is str else parse_yaml(text, f"{word} is not key=value")
            values[key] = convert(value, known[key], key)
        else:
            others.append(word)
    return values, others


def refuse(message: str) -> int:
    """Say in one line what is wrong with the settings. Returns the exit status for that."""
    if os.environ.get("RANK", "0") == "0":  # under torchrun one rank speaks for all
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def explain(error: BaseException, schema: type, argv: list[str]) -> str:
    """One line for an error of Hydra's: the override that caused it and the rule."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    overrides = [a for a in argv if not a.startswith("-")]
    for override in overrides:
        try:
            OverridesParser.create().parse_override(override)
        except HydraException as syntax:
            reason = str(syntax).split("See https")[0]
            return f"{override} is not key=value: {reason}; quote what is not plain text, as in 'key=\"...\"'"
    text = str(error)
    unknown = re.search(r"Could not override '([^']+)'", text) or re.search(r"Key '([^']+)' is not in struct", text)
    if unknown:
        key = unknown[1]
        override = next((o for o in overrides if o.lstrip("+~").split("=")[0] == key), key)
        if key.split(".")[0] in ("sweep", "sweep_dir", "launcher"):
            return f"{override} is a word for sweeps/launch.py"
        group, _, leaf = key.rpartition(".")
        settings = list(flatten(asdict(schema())))
        variants = {f.name: f.metadata.get("variants", {}) for f in fields(schema)}.get(group, {})
        owners = [name for name, variant in variants.items() if leaf in {f.name for f in fields(variant)}]
        if owners:
            return f"{override} is unknown: {leaf} belongs to {' and '.join(f'{group}={name}' for name in owners)}"
        chosen = dict(o.lstrip("+").partition("=")[::2] for o in overrides).get(group)
        if chosen in variants:
            return f"{override} is unknown{did_you_mean(leaf, [f.name for f in fields(variants[chosen])], group + '.')}"
        elsewhere = [k for k in settings if k.rpartition(".")[2] == leaf]  # nanoGPT's flat names
        siblings = elsewhere or [k for k in settings if k.rpartition(".")[0] == group]
        return f"{override} is unknown{did_you_mean(key, siblings)}"
    missing = re.search(r"Could not find '([^']+)'", text)
    groups = [p.name for p in CONFIG_DIR.iterdir() if p.is_dir()]
    for override in overrides:
        group, _, option = override.lstrip("+").partition("=")
        if group in groups and (missing is None or missing[1] == f"{group}/{option}"):
            options = sorted(p.stem for p in (CONFIG_DIR / group).glob("*.yaml"))
            if option not in options:
                return f"{override} must be one of {', '.join(options)}"
    return text
