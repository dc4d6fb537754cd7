"""The HTTP server: OpenAI's API over `AsyncLLM`, with vLLM's names where OpenAI has none.

A request's way: `app` (routes, keys, errors), `endpoint` (body, admission, disconnects), an API (`chat`, `completions`:
what to ask the engine), `generation` (outputs and parser events as they come), an API's format (`chat_format`,
`completion_format`: bytes). It knows nothing of the engine but `AsyncLLM`.
"""
