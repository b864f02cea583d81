"""The OpenAI HTTP edge."""
