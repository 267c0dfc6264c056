"""Programs for development and for preparing models."""
