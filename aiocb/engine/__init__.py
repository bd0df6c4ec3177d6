"""asyncio and threads live only here: the engine, its streams, the bridge, and the worker."""
