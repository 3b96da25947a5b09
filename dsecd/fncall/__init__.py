"""Calls: stateless programs in pools of places that are there before them. Keeps nothing between two calls."""
