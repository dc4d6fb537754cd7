"""Chat: messages, prompts, tools and the parsing of answers. Knows no HTTP."""
