"""The wire: framing, messages, the server loop. Knows nothing of what a sandbox is made of."""
