"""The command ``omni-ws mcp``: an MCP server by which programs speak with, listen to and ask people and models."""
