"""Networks of sandboxes: a router of our own, rules by name and by address, names that are answered."""
