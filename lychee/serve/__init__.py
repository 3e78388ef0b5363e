"""The service: an engine that many asynchronous callers share, and an OpenAI-compatible HTTP server on it."""
