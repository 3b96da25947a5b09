"""dsecd: one daemon per host that owns every sandbox on it. Start reading at ARCHITECTURE.md."""

__version__ = "0.1.0"
