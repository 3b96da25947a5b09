"""Handlers: one function for each method of the wire, thin, between messages and the sandbox room."""
