"""The names of `transformers.generation.continuous_batching` that programs use."""

from aiocb.compat.transformers.manager import ContinuousBatchingManager
from aiocb.compat.transformers.results import GenerationOutput, RequestStatus

__all__ = ["ContinuousBatchingManager", "GenerationOutput", "RequestStatus"]
