"""Loading transformers models and running plans on them. Needs torch; nothing here is imported by `import aiocb`."""
