"""Life-cycle moves, the registry, admission, deadlines, commands. Does no mount and makes no netns itself."""
