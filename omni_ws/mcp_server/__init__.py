"""The command ``omni-ws mcp``: an MCP server by which programs speak, listen, and ask people and models."""
