"""Anthropic's Messages API: bodies to chats, and turns to messages, whole and streamed."""
