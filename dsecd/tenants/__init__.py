"""Who may do what, and how much: projects, principals, tokens, quotas, the audit log."""
