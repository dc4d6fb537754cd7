"""The KV cache as ids: pages of the full layers, slots of the sliding ones, and which prefixes they hold.

Nothing here touches a tensor: what must be copied on the device is handed out as pairs of slots.
"""

from flint_runtime.kv_cache.manager import BlockTable, KVCacheGauges, KVCacheManager
from flint_runtime.kv_cache.sizing import KVCacheConfig, choose_kv_cache

__all__ = ["BlockTable", "KVCacheConfig", "KVCacheGauges", "KVCacheManager", "choose_kv_cache"]
