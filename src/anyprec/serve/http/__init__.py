"""Requests and answers: the protocol, the ASGI application, its paths and its page."""
