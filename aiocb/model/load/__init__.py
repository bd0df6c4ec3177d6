"""Finding and reading models: by hub name or folder, GGUF files, snapshots of what was read before. Worker thread."""
