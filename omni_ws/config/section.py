"""The base of the groups of settings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of a group of settings: immutable, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)

    @property
    def changed(self) -> frozenset[str]:
        """The names of settings whose values are not the defaults, which a file may repeat."""
        fields = type(self).model_fields
        return frozenset(name for name, field in fields.items() if getattr(self, name) != field.get_default())
