"""OpenAI's Realtime API: its events, translated to and from a conversation."""
