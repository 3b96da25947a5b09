"""Specs, the table of life-cycle moves, the registry, admission, deadlines, commands. Does no mount and no netns itself."""
