"""One line for what Hydra, OmegaConf or YAML found wrong with the command line or a config file."""

from __future__ import annotations

import re
import sys
import traceback
from typing import TYPE_CHECKING

from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import Container
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
from yaml import MarkedYAMLError, YAMLError

from mp_hydra import config
from mp_hydra.errors import ConfigError
from mp_hydra.paths import conf_dir

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_OPTION = {"experiment": "leave it out for none"}


def explain(error: Exception) -> str:
    """What is wrong and what would be right, for an error that was raised while a config was composed."""
    if isinstance(error, OverrideParseException):
        cure = "close brackets and quotes, and quote text with special characters, as in 'key=\"a, b\"'"
        return f"{error.override}: not of the form key=value; {cure}"
    if isinstance(error, MissingConfigException):
        return _option(error)
    if isinstance(error, (YAMLError, UnicodeDecodeError)):
        return _file(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    cause = error.__cause__ or error.__context__
    if not isinstance(cause, OmegaConfBaseException):
        cause = error
    composing = re.match(r"In '(.*?)': .* raised while composing", str(error))
    where = composing[1] if composing else _opened(error)
    return (f"{where}: " if where else "") + (_value(cause) or _command(str(error), sys.argv[1:]))


def _value(error: BaseException) -> str | None:
    """The line for a key or value that OmegaConf refused."""
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        return _key(error)
    if not isinstance(error, OmegaConfBaseException):
        return None
    key, found = str(error.full_key or ""), str(error.msg or error).splitlines()[0]
    if "is not a subclass of" in found:
        return f"{found}; a file chooses an option in its defaults list, - override /GROUP: OPTION"
    if not key:
        return None
    if isinstance(error, ValidationError):
        value = getattr(error, "value", None)
        if found.endswith("is not Optional"):
            found = "null is not possible here"
        return str(ConfigError(key, value, config.advice(key, value) or found))
    return f"{key}: {found}"


def _key(error: ConfigKeyError | ConfigAttributeError) -> str:
    parent = error.parent_node
    known = [str(key) for key in parent] if isinstance(parent, Container) else list(config.GROUPS)
    key = str(error.full_key or error.key)
    hint = f"{config.suggestion(key.rpartition('.')[2], known)}; " if known else ""
    return f"{key}: no such key; {hint}to add a key that is not in the config write +{key}=..."


def _option(error: MissingConfigException) -> str:
    missing = str(error.missing_cfg_file)
    group, _, option = missing.rpartition("/")
    options = list(error.options or []) or _options(group)
    if group and options:
        return str(ConfigError(group, option, f"no such option; {config.suggestion(option, options)}"))
    where = ", ".join(re.findall(r"path=file://(\S+)", str(error)))
    if where:
        return f"there is no config {missing} in {where}"
    return " ".join(str(error).split())


def _options(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def _file(error: Exception) -> str:
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: {error.problem}"
    return f"{_opened(error) or 'a config file'}: it is not UTF-8 text ({' '.join(str(error).split())})"


def _opened(error: BaseException) -> str | None:
    """The config file that Hydra was reading, which the error itself does not tell: a local of the frame that read it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "load_config"]
    return next((frame.f_locals["full_path"] for frame in frames if "full_path" in frame.f_locals), None)


_REMARKS = (
    (
        r"Ambiguous value for argument '(?P<key>.*?)=(?P<value>.*?)'",
        "{key}={value}: several values make a sweep, which needs -m; a list is written {key}=[{value}]",
    ),
    (r"Sweep parameters '(?P<item>.*)' requires --multirun", "{item}: several values make a sweep, which needs -m"),
    (r"An item is already at '(?P<key>.*?)'", "{key}: it is in the config already; write {key}=... without +"),
    (r"(?P<key>\S+) appears more than once", "{key}: it is chosen already; write {key}=... without +"),
    (r"force-add of config groups is not supported: '\++(?P<item>.*)'", "{item}: write it without +"),
)


def _command(message: str, arguments: Sequence[str]) -> str:
    """The line for what Hydra refused in words of its own."""
    for pattern, remark in _REMARKS:
        found = re.search(pattern, message)
        if found:
            return remark.format(**found.groupdict())
    if message.startswith("Config group override must be a string"):
        return _not_an_option(arguments) or message
    return " ".join(message.split())


def _not_an_option(arguments: Sequence[str]) -> str | None:
    """The line for the first group that is given null, a number or a boolean; Hydra does not say which it was.

    >>> _not_an_option(["seed=1", "precision=16"])
    'precision=16: no such option; known here: auto, fp32, mixed_bfloat16, mixed_float16, tf32'
    """
    for argument in arguments:
        group, _, values = argument.partition("=")
        for value in values.split(",") if group in config.GROUPS else ():
            if value.lower() == "null":
                cure = (
                    NO_OPTION.get(group) or f"choose an option of the group; {config.suggestion('', _options(group))}"
                )
                return str(ConfigError(group, None, cure))
            if value.lower() in ("true", "false") or _is_number(value):
                return str(ConfigError(group, value, f"no such option; {config.suggestion(value, _options(group))}"))
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_about_composing(error: BaseException) -> bool:
    """Whether an error came up while Hydra composed a config or made the output directory, and not in a run."""
    if isinstance(error, HydraException) and not isinstance(error, InstantiationException):
        return True
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    return "load_configuration" in frames or ("run_job" in frames and "_job" not in frames)
