"""The HTTP server: `aiocb serve`, OpenAI-compatible, and the chat page. Needs the extra `serve`.

```
uvicorn ─► Observer, Guard ─► route ─► Generation ─► Engine.stream ─► Answer ─► JSON, or events
```
"""

try:
    from aiocb.serve.app import create_app
    from aiocb.serve.config import ServeConfig
    from aiocb.serve.service import LoadProgress
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("aiocb"):
        raise
    message = f"the server needs more packages ({error.name} is missing): pip install 'aiocb[serve]'"
    raise ImportError(message, name=error.name) from error

__all__ = ["LoadProgress", "ServeConfig", "create_app"]
