"""The plug-in of docs/plugins.md: an engine that answers in capitals, and a front end with one route."""
