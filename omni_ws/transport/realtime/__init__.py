"""The Realtime API of OpenAI, over the conversation of the native WebSocket."""
