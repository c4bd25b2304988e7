"""Layers of values: what a file, the command line or a rule says, with the place of each value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Path = tuple[str, ...]  # ("batch", "micro_size")


def dotted(path: Iterable[Any]) -> str:
    """`batch.micro_size` for ("batch", "micro_size")."""
    return ".".join(str(part) for part in path)


@dataclass
class Layer:
    """Nested plain values and, for every path in them, where it was said (`recipes/demo.yaml:12`)."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Path, str] = field(default_factory=dict)

    def put(self, path: Path, value: Any, place: str) -> None:
        """Set one value, making the sections above it; a mapping is laid over what is there."""
        layer: Any = value
        for key in reversed(path):
            layer = {key: layer}
        self.lay_over(Layer(layer, {path: place, **{path[:n]: place for n in range(1, len(path))}}))

    def lay_over(self, upper: Layer) -> None:
        """Take over everything `upper` says; sections are merged, other values replaced."""
        self._merge(self.values, upper.values, (), upper)

    def _merge(self, lower: dict[str, Any], upper: dict[str, Any], at: Path, layer: Layer) -> None:
        for key, value in upper.items():
            path = (*at, key)
            if isinstance(value, dict) and isinstance(lower.get(key), dict):
                self._merge(lower[key], value, path, layer)
                continue
            self.places = {p: place for p, place in self.places.items() if p[: len(path)] != path}
            place = layer.place(path)
            assert place is not None, f"{dotted(path)} has a value but no place"
            self.places[path] = place
            self.places |= {p: place for p, place in layer.places.items() if p[: len(path)] == path}
            lower[key] = {} if isinstance(value, dict) else value
            if isinstance(value, dict):
                self._merge(lower[key], value, path, layer)

    def place(self, path: Iterable[Any]) -> str | None:
        """Where the value at `path`, or the nearest thing above it, was said; None if nowhere."""
        parts = tuple(path)
        while parts:
            if parts in self.places:
                return self.places[parts]
            parts = parts[:-1]
        return None

    def has(self, path: Path) -> bool:
        """Whether a value was said at exactly this path."""
        here: Any = self.values
        for key in path:
            if not isinstance(here, dict) or key not in here:
                return False
            here = here[key]
        return True

    def get(self, path: Path) -> Any:
        """The value at `path`; it must be there (see `has`)."""
        here: Any = self.values
        for key in path:
            here = here[key]
        return here
