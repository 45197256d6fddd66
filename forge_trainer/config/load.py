"""One validated config from a YAML file and command-line overrides, or one ConfigError.

The file and the overrides are merged first and validated once, so an override can repair a file
and every message has the full key path. Overrides are `--section.key value`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from forge_trainer.errors import ConfigError

C = TypeVar("C", bound=BaseModel)


def load_config(schema: type[C], path: str | Path, overrides: Sequence[str] = ()) -> C:
    """The config in `path` with `overrides` on top.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type, impossible relation.
    """
    values = _merge(_read_yaml(Path(path)), _parse_overrides(schema, overrides))
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        lines = [_explain(detail) for detail in error.errors()]
        raise ConfigError(f"{path}: " + "\n  ".join(["", *lines] if lines[1:] else lines)) from None


def print_help(schema: type[BaseModel], prog: str, usage: str) -> None:
    """Print every key with its type, default and meaning."""
    print(f"usage: {usage}\n")
    _cli_source(schema, prog, ["--help"])


def dump_config(config: BaseModel, path: Path) -> None:
    """Write the resolved config as YAML that `load_config` reads back."""
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False))


class _UniqueKeys(yaml.SafeLoader):
    """YAML's own rule, which PyYAML does not keep: of two equal keys it would take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node), key_node.start_mark.line + 1
            if key in lines:
                raise yaml.YAMLError(
                    f"{key} is given twice, in lines {lines[key]} and {line}; join them"
                )
            lines[key] = line
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(), _UniqueKeys)
    except OSError as error:
        raise ConfigError(f"cannot read config file {str(path)!r}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} is not YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"config file {str(path)!r} must hold a mapping, got {type(values).__name__}"
        )
    return values


def _parse_overrides(schema: type[BaseModel], overrides: Sequence[str]) -> dict[str, Any]:
    known: set[str] = set()
    refused: dict[str, str] = {}
    _collect_keys(schema, "", known, refused)
    for argument in overrides:
        key = argument.removeprefix("--").split("=")[0]
        if argument.startswith("--") and key in refused:
            raise ConfigError(f"{key} is refused: {refused[key]}")
        if argument.startswith("--") and key not in known:
            raise ConfigError(f"{key}: no such key; see --help{_suggest(key, known)}")
    try:
        source = _cli_source(schema, "overrides", list(overrides))
        return dict(source())
    except (SettingsError, ValueError) as error:
        raise ConfigError(f"command line: {error}") from error


def _cli_source(schema: type[BaseModel], prog: str, arguments: list[str]) -> CliSettingsSource[Any]:
    settings = type("Overrides", (schema, BaseSettings), {"__doc__": schema.__doc__})
    try:
        return CliSettingsSource(
            settings, cli_prog_name=prog, cli_parse_args=arguments, cli_exit_on_error=False
        )
    except SystemExit:
        if "--help" in arguments:
            raise
        raise ConfigError("command line: overrides are `--section.key value`") from None


def _collect_keys(
    schema: type[BaseModel], prefix: str, known: set[str], refused: dict[str, str]
) -> None:
    refused |= {prefix + name: why for name, why in getattr(schema, "refused", {}).items()}
    for field, info in schema.model_fields.items():
        name = info.alias or field
        known.add(prefix + name)
        annotation = info.annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        for option in options:
            if isinstance(option, type) and issubclass(option, BaseModel):
                _collect_keys(option, f"{prefix}{name}.", known, refused)


def _suggest(key: str, known: set[str]) -> str:
    import difflib

    near = difflib.get_close_matches(key, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        both = isinstance(value, dict) and isinstance(below, dict)
        merged[key] = _merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _explain(detail: ErrorDetails) -> str:
    key = ".".join(str(part) for part in detail["loc"]) or "config"
    if detail["type"] == "extra_forbidden":
        return f"{key}: no such key, got {detail['input']!r}"
    if detail["type"] == "missing":
        return f"{key}: is required"
    message = detail["msg"].removeprefix("Value error, ")
    if isinstance(detail["input"], dict | BaseModel):
        return f"{key}: {message}"
    return f"{key}: got {detail['input']!r}; {message[0].lower()}{message[1:]}"
