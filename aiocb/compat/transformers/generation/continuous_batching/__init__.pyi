from typing import Any

from aiocb.compat.transformers import ContinuousBatchingManager as ContinuousBatchingManager
from aiocb.compat.transformers import ContinuousMixin as ContinuousMixin
from aiocb.compat.transformers import RequestStatus as RequestStatus

def __getattr__(name: str) -> Any: ...
