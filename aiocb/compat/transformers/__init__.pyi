from typing import Any

import transformers
from transformers import AutoConfig as AutoConfig
from transformers import AutoTokenizer as AutoTokenizer
from transformers import ContinuousBatchingConfig as ContinuousBatchingConfig
from transformers import GenerationConfig as GenerationConfig

from aiocb.compat.transformers.auto import AutoClass
from aiocb.compat.transformers.auto import ContinuousMixin as ContinuousMixin
from aiocb.compat.transformers.entry import (
    continuous_batching_context_manager as continuous_batching_context_manager,
)
from aiocb.compat.transformers.entry import (
    destroy_cached_continuous_batching_manager as destroy_cached_continuous_batching_manager,
)
from aiocb.compat.transformers.entry import enable as enable
from aiocb.compat.transformers.entry import generate_batch as generate_batch
from aiocb.compat.transformers.entry import init_continuous_batching as init_continuous_batching
from aiocb.compat.transformers.manager import ContinuousBatchingManager as ContinuousBatchingManager
from aiocb.compat.transformers.results import GenerationOutput as GenerationOutput
from aiocb.compat.transformers.results import RequestQueueFull as RequestQueueFull
from aiocb.compat.transformers.results import RequestStatus as RequestStatus

__version__: str

class AutoModelForCausalLM(AutoClass, transformers.AutoModelForCausalLM): ...
class AutoModelForImageTextToText(AutoClass, transformers.AutoModelForImageTextToText): ...
class AutoModelForMultimodalLM(AutoClass, transformers.AutoModelForMultimodalLM): ...

def __getattr__(name: str) -> Any: ...
