"""Rollouts: agent sandbox and worker that outlive their trainer (docs/protocol.md, "Rollouts")."""
