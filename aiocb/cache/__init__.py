"""The paged KV cache's bookkeeping: block pools, prefix index, block tables. Torch-free."""

from aiocb.cache.blocks import BlockPool
from aiocb.cache.manager import CacheManager
from aiocb.cache.prefix import PrefixIndex
from aiocb.cache.sequence import CachedSequence

__all__ = ["BlockPool", "CacheManager", "CachedSequence", "PrefixIndex"]
