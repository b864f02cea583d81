"""OpenAI's Responses API: bodies and stored items to chats, and turns to responses, whole and streamed."""
