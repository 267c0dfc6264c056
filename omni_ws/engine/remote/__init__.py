"""The remote engine: other servers that speak the OpenAI API answer."""
