"""What every part of the config is."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


def _whole_path(folder: str) -> str:
    if not folder or folder.startswith("~"):
        raise ValueError("give a whole path; ~ is not expanded, and an empty one names no folder")
    return folder


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Folder = Annotated[str, AfterValidator(_whole_path)]
Seed = Annotated[int, Field(ge=0, lt=2**62)]
"""With room for what is added per rank."""
Seconds = Annotated[float, Field(ge=1.0, le=1e9)]


class Section(BaseModel):
    """A part of the config: frozen, and strict about keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    refused: ClassVar[dict[str, str]] = {}
    """Keys that others know and that are missing here on purpose, with the reason."""

    @model_validator(mode="before")
    @classmethod
    def keys_missing_on_purpose_tell_why(cls, values: Any) -> Any:
        for name, why in cls.refused.items() if isinstance(values, dict) else ():
            if name in values:
                raise ValueError(f"{name} is refused: {why}")
        return values

    @model_validator(mode="before")
    @classmethod
    def booleans_are_no_numbers(cls, values: Any) -> Any:
        """YAML reads `yes` and `on` as true, which pydantic would take for 1."""
        for name, value in values.items() if isinstance(values, dict) else ():
            info = cls.model_fields.get(name)
            if not isinstance(value, bool) or info is None:
                continue
            kinds = {info.annotation, *get_args(info.annotation)}
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"{name} is {value}; a number is wanted")
        return values
