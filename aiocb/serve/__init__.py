"""The HTTP server: `aiocb serve`, OpenAI-compatible, and the chat page. Needs the extra `serve`.

```
uvicorn ─► Observer, Guard ─► route ─► Generation ─► Engine.stream ─► Answer ─► JSON, or events
```
"""

from aiocb.serve.app import create_app
from aiocb.serve.config import ServeConfig
from aiocb.serve.service import LoadProgress

__all__ = ["LoadProgress", "ServeConfig", "create_app"]
