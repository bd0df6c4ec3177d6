"""Adapters by name: written by the worker thread, read by any."""

from __future__ import annotations

from typing import NamedTuple

from aiocb.errors import InvalidRequest, show_value

__all__ = ["LoadedAdapter", "LoadedAdapters"]


class LoadedAdapter(NamedTuple):
    """What a name stands for: the key of its content, and the folder that it came from."""

    key: str
    path: str


class LoadedAdapters:
    """Names of adapters. Two names of the same content share a key."""

    def __init__(self) -> None:
        self._by_name: dict[str, LoadedAdapter] = {}

    def find(self, name: str) -> LoadedAdapter | None:
        """What a name stands for, or None."""
        return self._by_name.get(name)

    def key_of(self, name: str) -> str:
        """The key of the content of an adapter.

        Raises:
            InvalidRequest: no adapter has this name.
        """
        found = self._by_name.get(name)
        if found is None:
            known = ", ".join(map(repr, tuple(self._by_name))) or "none"
            raise InvalidRequest(f"no adapter {show_value(name)} is loaded (there are: {known}); see load_adapter()")
        return found.key

    def put(self, name: str, adapter: LoadedAdapter) -> str | None:
        """Let a name stand for this; return the key that no name stands for any more, if there is one."""
        before = self._by_name.get(name)
        self._by_name = {**self._by_name, name: adapter}  # a new one: others read the old one meanwhile
        return None if before is None else self._unnamed(before.key)

    def remove(self, name: str) -> str | None:
        """Forget a name; return the key that no name stands for any more, if there is one."""
        key = self.key_of(name)
        self._by_name = {each: adapter for each, adapter in self._by_name.items() if each != name}
        return self._unnamed(key)

    def paths(self) -> dict[str, str]:
        """The folder of each, by name."""
        return {name: adapter.path for name, adapter in self._by_name.items()}

    def _unnamed(self, key: str) -> str | None:
        return None if any(adapter.key == key for adapter in self._by_name.values()) else key
