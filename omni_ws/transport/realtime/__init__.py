"""OpenAI's Realtime and Live APIs: their events, translated to and from a conversation."""
