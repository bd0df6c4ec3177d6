"""The HTTP server: `aiocb serve`, OpenAI-compatible, and the chat page. Needs the extra `serve`."""
