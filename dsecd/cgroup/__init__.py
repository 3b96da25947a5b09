"""cgroups of sandboxes: v2 and hybrid, limits, freezing, killing, figures."""
