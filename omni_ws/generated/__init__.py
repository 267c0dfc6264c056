"""Python modules that are made from protocol/salience.proto by `make stubs`; nothing here is written by hand."""
