"""Room of the native path: a whole step of a decoder in one call; weights, families, selection. Worker thread."""

from aiocb.model.native.runner import NativeRunner

__all__ = ["NativeRunner"]
