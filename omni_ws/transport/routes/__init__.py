"""The routes of the HTTP API: those that generate answers, and those of operators, recorded calls and web pages."""
