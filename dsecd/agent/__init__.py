"""The host end of the link to the agent inside a sandbox. Trusts nothing that arrives on it."""
