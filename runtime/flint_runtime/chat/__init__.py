"""Chat without HTTP: messages and tools in, a prompt; tokens in, reasoning, content and calls."""
