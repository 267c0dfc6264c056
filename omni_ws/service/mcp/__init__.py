"""MCP servers of a session: their tools, and the calls that the server makes for the model."""
