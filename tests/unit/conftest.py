"""Unit tests need no root and write nothing into the tree."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("dsecd", database=None, deadline=None, print_blob=True)
settings.load_profile("dsecd")
